// One chart: lines or stacked areas over the steps. The legend shows the numbers of the step under
// the pointer, of the last step otherwise, as they stand in metrics.jsonl.

const HEIGHT = 170;
const MARGIN = { left: 46, right: 10, top: 8, bottom: 20 };
const MOST_DOTS = 40;

// spec: {title, unit, series: [{name, values: Map(step -> value)}], log, stacked, floor, ceiling}
function makeChart(spec, onStep) {
  const steps = [...new Set(spec.series.flatMap((series) => [...series.values.keys()]))].sort(
    (a, b) => a - b,
  );
  const svg = makeSvg("svg", {
    role: "slider",
    tabindex: "0",
    "aria-label": `${spec.title}, by step`,
  });
  const at = make("span", { class: "chart-step number" });
  const values = spec.series.map(() => make("span", { class: "number" }));
  const rows = spec.series.map((series, number) =>
    make(
      "li",
      null,
      make("span", { class: `swatch line-${number % 8}`, "aria-hidden": "true" }),
      make("span", { class: "chart-name" }, series.label ?? series.name),
      values[number],
    ),
  );
  const head = make(
    "div",
    { class: "chart-head" },
    make("h3", null, spec.title),
    make("span", { class: "muted" }, spec.unit ?? ""),
    at,
  );
  const figure = make(
    "figure",
    { class: "chart" },
    head,
    svg,
    make("ul", { class: "chart-legend" }, ...rows),
  );
  const chart = { spec, steps, svg, at, values, figure, shown: steps.at(-1), selected: null };
  listen(chart, onStep);
  new ResizeObserver(() => drawChart(chart)).observe(svg);
  showStep(chart, chart.shown);
  return chart;
}

function listen(chart, onStep) {
  const { svg, steps } = chart;
  const nearest = (event) => {
    const wanted = chart.x?.invert(event.clientX - svg.getBoundingClientRect().left);
    return steps.reduce(
      (best, step) => (Math.abs(step - wanted) < Math.abs(best - wanted) ? step : best),
      steps[0],
    );
  };
  const back = () => showStep(chart, steps.at(-1), true);
  svg.addEventListener("pointermove", (event) => showStep(chart, nearest(event)));
  svg.addEventListener("pointerleave", back);
  svg.addEventListener("blur", back);
  svg.addEventListener("click", (event) => onStep(nearest(event)));
  svg.addEventListener("keydown", (event) => {
    const move = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    const place = steps.indexOf(chart.shown) + (move ?? 0);
    if (move) showStep(chart, steps[Math.max(0, Math.min(steps.length - 1, place))]);
    else if (event.key === "Enter") onStep(chart.shown);
    else return;
    event.preventDefault();
    event.stopPropagation();
  });
}

function showStep(chart, step, resting = false) {
  chart.shown = step;
  chart.at.textContent = `step ${step}`;
  const texts = chart.spec.series.map((series) =>
    series.values.has(step) ? exact(series.values.get(step)) : NOTHING,
  );
  for (const [number, text] of texts.entries()) chart.values[number].textContent = text;
  chart.svg.setAttribute("aria-valuemin", chart.steps[0]);
  chart.svg.setAttribute("aria-valuemax", chart.steps.at(-1));
  chart.svg.setAttribute("aria-valuenow", step);
  chart.svg.setAttribute(
    "aria-valuetext",
    `step ${step}: ${chart.spec.series.map((series, number) => `${series.name} ${texts[number]}`).join(", ")}`,
  );
  if (chart.cursor) placeLine(chart, chart.cursor, resting ? null : step);
}

function selectSteps(chart, from, to) {
  chart.selected = from === null && to === null ? null : [from ?? -Infinity, to ?? Infinity];
  drawChart(chart);
}

function placeLine(chart, line, step) {
  line.setAttribute("visibility", step === null ? "hidden" : "visible");
  if (step !== null) for (const end of ["x1", "x2"]) line.setAttribute(end, chart.x(step));
}

function drawChart(chart) {
  const width = chart.svg.clientWidth;
  if (width === 0) return;
  const room = chart.steps.length > 1 ? 0 : 0.5;
  chart.x = linear(
    chart.steps[0] - room,
    chart.steps.at(-1) + room,
    MARGIN.left,
    width - MARGIN.right,
  );
  const layers = chart.spec.stacked
    ? stack(chart)
    : chart.spec.series.map((series) => points(chart, series.values));
  const { y, ticks } = yScale(chart.spec, layers);
  chart.cursor = makeSvg("line", { class: "cursor", y1: MARGIN.top, y2: HEIGHT - MARGIN.bottom });
  chart.svg.replaceChildren(
    ...selection(chart),
    ...axes(chart, width, y, ticks),
    ...layers.flatMap((layer, number) => mark(chart, layer, y, number)),
    chart.cursor,
  );
  placeLine(chart, chart.cursor, null);
}

function selection(chart) {
  if (!chart.selected) return [];
  const [from, to] = chart.selected.map((step) =>
    chart.x(Math.max(chart.steps[0], Math.min(chart.steps.at(-1), step))),
  );
  return [
    makeSvg("rect", {
      class: "selection",
      x: from - 3,
      width: Math.max(6, to - from + 6),
      y: MARGIN.top,
      height: HEIGHT - MARGIN.top - MARGIN.bottom,
    }),
  ];
}

function linear(low, high, start, end) {
  const span = high - low || 1;
  const scale = (value) => start + ((value - low) / span) * (end - start);
  scale.invert = (place) => low + ((place - start) / (end - start)) * span;
  return scale;
}

// [step, low, high] of each number that can be drawn; a gap (null) where one cannot.
function points(chart, values) {
  return [...values].map(([step, value]) =>
    drawable(chart.spec, value) ? [step, null, value] : null,
  );
}

function drawable(spec, value) {
  return Number.isFinite(value) && (!spec.log || value > 0);
}

// A phase that a step did not have took no time.
function stack(chart) {
  const below = new Map(chart.steps.map((step) => [step, 0]));
  return chart.spec.series.map((series) =>
    chart.steps.map((step) => {
      const low = below.get(step);
      const value = series.values.get(step);
      const high = low + (Number.isFinite(value) ? value : 0);
      below.set(step, high);
      return [step, low, high];
    }),
  );
}

function yScale(spec, layers) {
  const tops = layers
    .flat()
    .filter(Boolean)
    .map((point) => point[2]);
  const low = Math.min(...(spec.floor === undefined ? [] : [spec.floor]), ...tops);
  const high = Math.max(...(spec.ceiling === undefined ? [] : [spec.ceiling]), ...tops);
  if (!tops.length) return { y: linear(0, 1, HEIGHT - MARGIN.bottom, MARGIN.top), ticks: [] };
  if (spec.log) return logScale(low, high);
  const step = niceStep((high - low || Math.abs(high) || 1) / 4);
  const first = Math.floor(low / step + 1e-9) * step;
  const last = Math.max(first + step, Math.ceil(high / step - 1e-9) * step);
  const ticks = Array.from({ length: Math.round((last - first) / step) + 1 }, (_, number) =>
    Number((first + number * step).toPrecision(12)),
  );
  return { y: linear(first, last, HEIGHT - MARGIN.bottom, MARGIN.top), ticks };
}

function logScale(low, high) {
  const first = Math.floor(Math.log10(low));
  const last = Math.max(first + 1, Math.ceil(Math.log10(high)));
  const every = Math.ceil((last - first) / 5);
  const place = linear(first, last, HEIGHT - MARGIN.bottom, MARGIN.top);
  const ticks = [];
  for (let power = first; power <= last; power += every) ticks.push(10 ** power);
  return { y: (value) => place(Math.log10(value)), ticks };
}

function niceStep(rough) {
  const power = 10 ** Math.floor(Math.log10(rough));
  return power * [1, 2, 2.5, 5, 10].find((factor) => factor * power >= rough * 0.999);
}

function axes(chart, width, y, ticks) {
  const lines = ticks.flatMap((tick) => [
    makeSvg("line", {
      class: "grid",
      x1: MARGIN.left,
      x2: width - MARGIN.right,
      y1: y(tick),
      y2: y(tick),
    }),
    makeSvg(
      "text",
      { class: "tick", x: MARGIN.left - 6, y: y(tick) + 4, "text-anchor": "end" },
      tickText(chart.spec, tick),
    ),
  ]);
  const { steps } = chart;
  const ends =
    steps.length > 1
      ? [
          [steps[0], "start"],
          [steps.at(-1), "end"],
        ]
      : [[steps[0], "middle"]];
  return [
    ...lines,
    ...ends.map(([step, anchor]) =>
      makeSvg(
        "text",
        { class: "tick", x: chart.x(step), y: HEIGHT - 5, "text-anchor": anchor },
        String(step),
      ),
    ),
  ];
}

function tickText(spec, tick) {
  return spec.log ? minus(`1e${Math.round(Math.log10(tick))}`) : brief(tick);
}

function mark(chart, layer, y, number) {
  if (chart.spec.stacked) return [area(chart, layer, y, number)];
  const known = layer.filter(Boolean);
  const path = layer
    .map((point, at) =>
      point ? `${layer[at - 1] ? "L" : "M"}${chart.x(point[0])} ${y(point[2])}` : "",
    )
    .join("");
  const dots =
    known.length <= MOST_DOTS
      ? known.map(([step, , value]) =>
          makeSvg("circle", {
            class: `line-${number % 8}`,
            cx: chart.x(step),
            cy: y(value),
            r: 2.5,
          }),
        )
      : [];
  return [makeSvg("path", { class: `curve line-${number % 8}`, d: path }), ...dots];
}

function area(chart, layer, y, number) {
  const along = (points, at) => points.map((point) => `${chart.x(point[0])} ${y(point[at])}`);
  const wide =
    layer.length === 1
      ? [
          [layer[0][0] - 0.2, ...layer[0].slice(1)],
          [layer[0][0] + 0.2, ...layer[0].slice(1)],
        ]
      : layer;
  const outline = [...along(wide, 2), ...along([...wide].reverse(), 1)];
  return makeSvg("path", {
    class: `area line-${number % 8}`,
    d: outline.length ? `M${outline.join("L")}Z` : "",
  });
}
