// What is wrong with the page as it is shown now.
() => {
  const name = (e) => {
    const id = e.id ? "#" + e.id : "";
    const cls = typeof e.className === "string" && e.className ? "." + e.className.trim().split(/\s+/)[0] : "";
    return e.tagName.toLowerCase() + id + cls + " " + (e.textContent || "").trim().slice(0, 40);
  };
  const width = document.documentElement.clientWidth;
  // Something that scrolls or is cut keeps what is in it off the page's width.
  const kept = (e) => {
    for (let p = e.parentElement; p && p !== document.body; p = p.parentElement) {
      const style = getComputedStyle(p);
      if (/(auto|scroll|hidden|clip)/.test(style.overflowX) || style.position === "fixed") return true;
    }
    return false;
  };
  const shown = (e) => e.getClientRects().length > 0 && getComputedStyle(e).visibility !== "hidden";
  const wide = [...document.querySelectorAll("body *")].filter((e) => {
    const box = e.getBoundingClientRect();
    return shown(e) && box.right > width + 1 && box.width > 0 && !kept(e) && getComputedStyle(e).position !== "fixed";
  });
  const pictures = [...document.querySelectorAll("img")];
  const named = (s) => s.closest("[aria-hidden='true']") || s.getAttribute("aria-label")
    || s.querySelector(":scope > title")?.textContent.trim()
    || (s.getAttribute("aria-labelledby") || "").split(/\s+/).some((id) => id && document.getElementById(id)?.textContent.trim());
  const ids = [...document.querySelectorAll("[id]")].map((e) => e.id);
  return {
    title: document.querySelector("h1")?.textContent.trim() || "",
    width, scrollWidth: document.documentElement.scrollWidth,
    overflowing: wide.slice(0, 5).map(name),
    broken: pictures.filter((i) => !(i.complete && i.naturalWidth > 0)).map((i) => i.src.slice(0, 80)),
    silent: pictures.filter((i) => !i.alt.trim()).map((i) => i.src.slice(0, 80))
      .concat([...document.querySelectorAll("main svg")].filter((s) => !s.parentElement.closest("svg") && !named(s)).map(name))
      .concat([...document.querySelectorAll("main [role='figure'], main [role='img']")].filter((e) => e.tagName !== "svg" && !named(e)).map(name)),
    repeated: [...new Set(ids.filter((id, i) => ids.indexOf(id) !== i))],
    words: document.querySelector("main")?.innerText.trim().split(/\s+/).length || 0,
  };
}
