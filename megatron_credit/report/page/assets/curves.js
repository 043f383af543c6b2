// Which charts a run gets, and the chooser for every other metric.

const CHARTS = [
  {
    title: "Reward",
    match: /^reward\/mean/,
    floor: 0,
    unit: "training rollouts",
    strip: "reward/",
  },
  {
    title: "Accuracy",
    match: /^eval\/.*(accuracy|pass@|maj@)/,
    floor: 0,
    ceiling: 1,
    unit: "held-out prompts",
    strip: "eval/",
  },
  {
    title: "Outcomes",
    match: /^reward\/(right|wrong|unparsed|timeout|error)$/,
    stacked: true,
    floor: 0,
    unit: "share of rollouts, stacked",
    strip: "reward/",
  },
  { title: "Entropy", match: /^policy\/entropy$/, floor: 0, unit: "nat a token", strip: "policy/" },
  {
    title: "Log-prob mismatch",
    match: /^mismatch\//,
    log: true,
    unit: "nat, log axis",
    strip: "mismatch/",
  },
  {
    title: "Groups without gradient",
    match: /^group\/equal_rewards$/,
    floor: 0,
    ceiling: 1,
    unit: "share of groups",
    strip: "group/",
  },
  {
    title: "Time",
    match: /^timing\/(?!step_s$).*_s$/,
    stacked: true,
    floor: 0,
    unit: "seconds a step, stacked",
    strip: "timing/",
  },
];
const MOST_SERIES = 8;

function seriesOf(metrics, name) {
  const having = metrics.filter((record) => name in record);
  return { name, values: new Map(having.map((record) => [record.step, record[name]])) };
}

function metricNames(metrics) {
  const names = new Set(metrics.flatMap((record) => Object.keys(record)));
  names.delete("step");
  return [...names];
}

function withSeries(spec, names, metrics) {
  const series = names
    .slice(0, MOST_SERIES)
    .map((name) => ({ ...seriesOf(metrics, name), label: name.slice(spec.strip.length) }));
  const rest = names.length > MOST_SERIES ? `, ${MOST_SERIES} of ${names.length} metrics` : "";
  return { ...spec, series, unit: spec.unit + rest };
}

function makeCurves(run, onStep) {
  const names = metricNames(run.metrics);
  const charts = [];
  const grid = make("div", { class: "charts" });
  for (const spec of CHARTS) {
    const found = names.filter((name) => spec.match.test(name));
    if (found.length) charts.push(makeChart(withSeries(spec, found, run.metrics), onStep));
  }
  grid.append(...charts.map((chart) => chart.figure));
  const absent = make("p", { class: "muted" }, "The run has recorded no metrics.");
  const chooser = names.length ? makeChooser(run, names, grid, charts, onStep) : null;
  const head = make(
    "div",
    { class: "section-head" },
    make("h2", null, "Curves"),
    make(
      "span",
      { class: "muted wide-only" },
      names.length ? "point at a step for its numbers, click to see its rollouts" : "",
    ),
    chooser,
  );
  return { node: make("div", null, head, names.length ? grid : absent), charts };
}

// Charts of metrics that have no chart of their own come first and can be many.
function makeChooser(run, names, grid, charts, onStep) {
  const select = make(
    "select",
    { id: "metric", "aria-label": "Add a chart of another metric" },
    make("option", { value: "" }, "add a chart\u2026"),
    ...[...names].sort().map((name) => make("option", { value: name }, name)),
  );
  select.addEventListener("change", () => {
    const spec = { title: select.value, series: [seriesOf(run.metrics, select.value)] };
    const chart = makeChart(spec, onStep);
    const close = make(
      "button",
      {
        class: "quiet",
        "aria-label": `remove the chart of ${select.value}`,
        click: () => {
          chart.figure.remove();
          charts.splice(charts.indexOf(chart), 1);
        },
      },
      "\u00d7",
    );
    chart.figure.querySelector(".chart-head").append(close);
    charts.push(chart);
    grid.append(chart.figure);
    select.value = "";
    chart.figure.scrollIntoView({ block: "nearest" });
  });
  return select;
}
