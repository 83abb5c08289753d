// The site's search: takes the place of Fuse.js, under the same name.
// Every word must occur; what is in a title counts more than what is in the
// text, a phrase more than its words; a page shows its three best sections.
window.Fuse = class {
  constructor(entries) {
    this.entries = entries.map((item) => ({
      item,
      title: item.title.toLowerCase(),
      section: item.section.toLowerCase(),
      text: item.text.toLowerCase(),
      page: item.href.split("#")[0],
    }));
  }

  static count(text, word) {
    let found = 0;
    for (let at = text.indexOf(word); at >= 0 && found < 8; at = text.indexOf(word, at + word.length)) found += 1;
    return found;
  }

  score(entry, phrase, words) {
    let score = 0, matched = 0;
    for (const word of words) {
      const inTitle = entry.title.includes(word), inSection = entry.section.includes(word);
      const inText = Fuse.count(entry.text, word);
      if (inTitle || inSection || inText) matched += 1;
      score += 6 * inTitle + 8 * inSection + inText;
    }
    if (entry.title.startsWith(phrase)) score += 60;
    else if (entry.title.includes(phrase)) score += 30;
    if (entry.section === phrase) score += 70;
    else if (entry.section.includes(phrase)) score += 25;
    if (entry.text.includes(phrase)) score += 15;
    // A page's beginning before its parts.
    if (!entry.section) score += entry.title.startsWith(phrase) ? 60 : 5;
    return { matched, score };
  }

  search(query, { limit = 20 } = {}) {
    const phrase = query.toLowerCase().trim();
    const words = [...new Set(phrase.split(/\s+/))].filter((w) => w);
    let hits = this.entries
      .map((entry) => ({ ...this.score(entry, phrase, words), entry }))
      .filter((hit) => hit.matched);
    const most = Math.max(0, ...hits.map((hit) => hit.matched));
    hits = hits.filter((hit) => hit.matched === most).sort((a, b) => b.score - a.score);
    const shown = new Map();
    return hits.filter(({ entry }) => {
      const n = (shown.get(entry.page) || 0) + 1;
      shown.set(entry.page, n);
      return n <= 3;
    }).slice(0, limit).map(({ entry }) => ({ item: entry.item }));
  }
};
