// What is seen of a page, each kind once: [{name, ratio, least}], ratio being WCAG 2.2's between the computed colours.
() => {
  const parse = text => {
    const [red, green, blue, alpha = 1] = text.match(/[\d.]+/g).map(Number);
    return [red, green, blue, alpha];
  };
  const over = ([r, g, b, alpha], [R, G, B]) => [r * alpha + R * (1 - alpha), g * alpha + G * (1 - alpha), b * alpha + B * (1 - alpha), 1];
  const ground = element => {
    if (!element) return [255, 255, 255, 1];
    const own = parse(getComputedStyle(element).backgroundColor);
    return own[3] === 1 ? own : over(own, ground(element.parentElement));
  };
  const luminance = colour => {
    const [red, green, blue] = colour.map(part => part / 255).map(part => (part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4));
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue;
  };
  const contrast = (one, other) => {
    const [low, high] = [luminance(one), luminance(other)].sort((a, b) => a - b);
    return (high + 0.05) / (low + 0.05);
  };
  const seen = new Map();
  const found = (name, colour, behind, least) => {
    const ratio = contrast(over(colour, behind), behind);
    const known = seen.get(name);
    if (!known || ratio < known.ratio) seen.set(name, { name, ratio, least });
  };
  const named = element => [element.localName, ...element.classList].join(".");

  for (const element of document.querySelectorAll("body *")) {
    if (!element.checkVisibility() || element.closest("svg, option, datalist")) continue;
    const style = getComputedStyle(element), field = element.matches("input, select, textarea");
    const text = field || [...element.childNodes].some(node => node.nodeType === Node.TEXT_NODE && node.data.trim());
    const name = element.closest("tr.group") ? "tr.group th" : element.closest("tr.chosen") ? `tr.chosen ${named(element)}` : named(element);
    if (text) found(name, parse(style.color), ground(element), 4.5);
    if (element.placeholder) found("input::placeholder", parse(getComputedStyle(element, "::placeholder").color), ground(element), 4.5);
    if ((field || element.matches("button")) && parseFloat(style.borderTopWidth))
      found(`${field ? "field" : "button"} border`, parse(style.borderTopColor), ground(element.parentElement), 3);
    if (element.matches(":focus-visible") && element.id !== "main") found("focus", parse(style.outlineColor), ground(element.parentElement), 3);
    if (element.matches(".key")) found(`i ${element.classList[1]}`, parse(style.backgroundColor), ground(element.parentElement), 3);
  }
  for (const shape of document.querySelectorAll("rect, path:not(.area, .edge), polyline")) {
    if (!shape.checkVisibility()) continue;
    const style = getComputedStyle(shape), svg = shape.ownerSVGElement;
    const behind = [ground(svg), ground(svg.parentElement)];
    const shade = svg.matches(".tiles"); // its outline says where it is
    const edge = svg.querySelector(".edge");
    if (style.fill !== "none" && !shade) {
      for (const each of behind) found(shape.classList[0] || named(shape), parse(style.fill), each, 3);
      if (edge) found(`${shape.classList[0]} edge`, parse(getComputedStyle(edge).stroke), parse(style.fill), 3);
    }
    if (style.stroke !== "none") for (const each of behind) found(named(shape), parse(style.stroke), each, 3);
  }
  for (const bar of document.querySelectorAll("svg.bar")) {
    const parts = bar.querySelectorAll("rect").length;
    const edges = (bar.querySelector(".edge")?.getAttribute("d").match(/M/g) || []).length;
    if (parts) found("edges of a bar", [0, 0, 0, 1], edges === parts - 1 ? [255, 255, 255, 1] : [0, 0, 0, 1], 3);
  }
  return [...seen.values()];
}
