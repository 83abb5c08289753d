// The lowest contrast (WCAG's ratio) of the text of each selector.
(selectors) => {
  const parse = (c) => {
    const n = c.match(/-?[\d.]+(e-?\d+)?/g).map(Number);
    const scale = c.startsWith("color(") ? 255 : 1;
    return { rgb: n.slice(0, 3).map((v) => v * scale), alpha: n.length > 3 ? n[3] : 1 };
  };
  const over = (top, below) => top.rgb.map((v, i) => v * top.alpha + below[i] * (1 - top.alpha));
  const ground = (e) => {
    const layers = [];
    for (let p = e; p; p = p.parentElement) {
      const c = parse(getComputedStyle(p).backgroundColor);
      if (c.alpha > 0) layers.push(c);
      if (c.alpha === 1) break;
    }
    return layers.reverse().reduce((below, top) => over(top, below), [255, 255, 255]);
  };
  const opacity = (e) => { let o = 1; for (let p = e; p; p = p.parentElement) o *= Number(getComputedStyle(p).opacity); return o; };
  const light = (rgb) => {
    const [r, g, b] = rgb.map((v) => v / 255).map((v) => (v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const ratio = (e) => {
    const below = ground(e), ink = parse(getComputedStyle(e).color);
    const a = light(over({ rgb: ink.rgb, alpha: ink.alpha * opacity(e) }, below)), b = light(below);
    return (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
  };
  return Object.fromEntries(selectors.map((s) => {
    const found = [...document.querySelectorAll(s)].filter((e) => e.getClientRects().length && e.textContent.trim());
    return [s, found.length ? Math.min(...found.map(ratio)) : null];
  }));
}
