// The columns of the table and the order of its rows.

const COLUMNS = [
  { key: "step", label: "step", width: "52px", right: true },
  { key: "source", label: "source", width: "minmax(70px, 0.7fr)" },
  { key: "prompt", label: "prompt", width: "minmax(120px, 1.6fr)" },
  { key: "sample", label: "sample", width: "64px", right: true },
  { key: "reward", label: "reward", width: "66px", right: true, show: (row) => brief(row.reward) },
  { key: "outcome", label: "outcome", width: "96px", show: (row) => outcomeBadge(row.outcome) },
  { key: "finish", label: "finish", width: "74px" },
  { key: "tokens", label: "tokens", width: "66px", right: true },
  {
    key: "credit",
    label: "mean |adv.|",
    width: "92px",
    right: true,
    show: (row) => brief(row.credit),
  },
  { key: "answer", label: "answer", width: "minmax(70px, 1fr)" },
  {
    key: "parsed",
    label: "parsed",
    width: "minmax(70px, 1fr)",
    show: (row) => row.parsed ?? NOTHING,
  },
];

function columnsOf(run) {
  return COLUMNS.filter(
    (column) => column.key !== "source" || run.rollouts.some((row) => row.source),
  );
}

function cellOf(row, column) {
  return column.show ? column.show(row) : String(row[column.key]);
}

// Rows without a value come last in both directions.
function inOrder(rows, key, direction) {
  const collator = new Intl.Collator("en", { numeric: true });
  const blank = (value) => value === null || value === "";
  const compare = (a, b) => (typeof a === "string" ? collator.compare(a, b) : a - b);
  return [...rows].sort((left, right) => {
    const [a, b] = [left[key], right[key]];
    if (blank(a) || blank(b)) return blank(a) - blank(b) || left.number - right.number;
    return direction * compare(a, b) || left.number - right.number;
  });
}
