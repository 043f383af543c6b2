// What the table leaves out.

const GROUP_KINDS = {
  all: ["all groups", () => true],
  mixed: ["groups with both outcomes", (group) => group.mixed],
  flat: ["zero-gradient groups", (group) => group.noGradient],
};

// Controls that call `onChange(test)`, where test(row) says whether a row is to be shown.
function makeFilters(run, speller, onChange) {
  const distinct = (key) => [...new Set(run.rollouts.map((row) => row[key]))].sort();
  const parts = {
    text: make("input", {
      type: "search",
      id: "search",
      placeholder: "search prompts and responses",
      "aria-label": "Search in prompts and responses",
    }),
    outcome: choice("Outcome", [
      ["", "all outcomes"],
      ...distinct("outcome").map((name) => [name, name]),
    ]),
    source: choice("Source", [
      ["", "all sources"],
      ...distinct("source").map((name) => [name, name || "(none)"]),
    ]),
    group: choice(
      "Groups",
      Object.entries(GROUP_KINDS).map(([key, [label]]) => [key, label]),
    ),
    from: stepInput("First step", "from"),
    to: stepInput("Last step", "to"),
    truncated: make("input", { type: "checkbox", id: "truncated" }),
  };
  const filters = { parts, texts: null, charts: [] };
  const changed = () => refilter(run, speller, filters, onChange);
  for (const part of Object.values(parts)) part.addEventListener("input", changed);
  filters.reset = make(
    "button",
    {
      class: "quiet",
      click: () => {
        clearFilters(parts);
        changed();
      },
    },
    "clear",
  );
  filters.node = make(
    "div",
    { class: "filters", role: "search" },
    parts.text,
    parts.outcome,
    distinct("source").length > 1 ? parts.source : null,
    parts.group,
    make("span", { class: "steps" }, "steps", parts.from, "\u2013", parts.to),
    make("label", null, parts.truncated, "truncated"),
    filters.reset,
  );
  filters.setSteps = (from, to) => {
    [parts.from.value, parts.to.value] = [from ?? "", to ?? ""];
    changed();
  };
  return filters;
}

function choice(label, options) {
  return make(
    "select",
    { "aria-label": label },
    ...options.map(([value, text]) => make("option", { value }, text)),
  );
}

function stepInput(label, placeholder) {
  return make("input", { type: "number", class: "step-input", "aria-label": label, placeholder });
}

function clearFilters(parts) {
  for (const part of Object.values(parts)) {
    if (part.type === "checkbox") part.checked = false;
    else if (part.tagName === "SELECT") part.selectedIndex = 0;
    else part.value = "";
  }
}

function stepBounds(parts) {
  return [parts.from, parts.to].map((part) => (part.value === "" ? null : Number(part.value)));
}

async function refilter(run, speller, filters, onChange) {
  const { parts } = filters;
  const wanted = parts.text.value.trim().toLowerCase();
  if (wanted && !filters.texts) {
    parts.text.setAttribute("aria-busy", "true");
    filters.texts = searchTexts(run, speller);
  }
  const texts = wanted ? await filters.texts : null;
  parts.text.removeAttribute("aria-busy");
  const [from, to] = stepBounds(parts);
  for (const chart of filters.charts) selectSteps(chart, from, to);
  onChange(
    (row) =>
      (from === null || row.step >= from) &&
      (to === null || row.step <= to) &&
      (!parts.outcome.value || row.outcome === parts.outcome.value) &&
      (!parts.source.selectedIndex || row.source === parts.source.value) &&
      (!parts.truncated.checked || row.finish === "length") &&
      GROUP_KINDS[parts.group.value][1](row.group) &&
      (!texts || texts[row.number].includes(wanted)),
  );
}
