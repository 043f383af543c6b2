// The address of a rollout: #step=3&prompt=...&sample=2, for links that others can open.

function linkTo(viewer) {
  const { row, other, beside } = viewer;
  const parts = {
    step: row.step,
    prompt: row.prompt,
    sample: row.sample,
    colour: colourShown(viewer),
  };
  if (beside && other) parts.beside = other.sample;
  return `#${new URLSearchParams(parts)}`;
}

// {row, other, beside, colour}, or null where the address names no rollout of this page.
function followLink(run, hash) {
  const wanted = new URLSearchParams(hash.slice(1));
  const group = run.groups.find(
    (each) => String(each.step) === wanted.get("step") && each.prompt === wanted.get("prompt"),
  );
  if (!group) return null;
  const bySample = (sample) =>
    rolloutsOf(run, group).find((row) => String(row.sample) === sample) ?? null;
  const row = bySample(wanted.get("sample")) ?? run.rollouts[group.first];
  return {
    row,
    other: bySample(wanted.get("beside")) ?? undefined,
    beside: wanted.has("beside"),
    colour: wanted.get("colour"),
  };
}
