// Pictures take their colours from the page, and follow it when light turns to dark.
(function () {
  const dark = matchMedia("(prefers-color-scheme: dark)");
  function paint() {
    const style = getComputedStyle(document.documentElement);
    const text = style.getPropertyValue("--text").trim(), line = style.getPropertyValue("--line").trim();
    for (const shown of Bokeh.documents) for (const root of shown.roots()) for (const model of root.references()) {
      if (model.type.endsWith("Axis")) model.setv({
        axis_label_text_color: text, major_label_text_color: text, axis_line_color: line, major_tick_line_color: line, minor_tick_line_color: line
      });
      else if (model.type === "Grid") model.setv({grid_line_color: line});
      else if (model.type === "Legend") model.setv({label_text_color: text});
    }
  }
  dark.addEventListener("change", paint);
  if (document.readyState === "complete") paint(); else addEventListener("load", () => setTimeout(paint, 0));
})();
