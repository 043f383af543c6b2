// The table of rollouts. Only the rows in sight are in the document.

const ROW_HEIGHT = 28;
const SPARE_ROWS = 6;

function makeTable(run, onOpen) {
  const columns = columnsOf(run);
  const table = {
    run,
    columns,
    rows: run.rollouts,
    test: () => true,
    key: null,
    direction: 1,
    open: null,
    onOpen,
  };
  table.count = make("span", { class: "muted", id: "row-count", role: "status" });
  table.head = make(
    "div",
    { role: "row", class: "row head", "aria-rowindex": "1" },
    ...columns.map((column) => heading(table, column)),
  );
  table.body = make("div", { role: "rowgroup", class: "rows" });
  table.node = make(
    "div",
    {
      role: "grid",
      class: "table",
      tabindex: "0",
      "aria-label": "Rollouts; arrows choose a row, Enter goes to the viewer",
      "aria-colcount": columns.length,
    },
    table.head,
    table.body,
  );
  table.node.style.setProperty("--columns", columns.map((column) => column.width).join(" "));
  table.node.addEventListener("scroll", () => drawRows(table));
  table.node.addEventListener("keydown", (event) => tableKey(table, event));
  new ResizeObserver(() => drawRows(table)).observe(table.node);
  refreshTable(table);
  return table;
}

function heading(table, column) {
  const button = make("button", { click: () => sortTable(table, column.key) }, column.label);
  return make(
    "div",
    { role: "columnheader", class: column.right ? "numeric" : "", "data-key": column.key },
    button,
  );
}

function sortTable(table, key) {
  const again = table.key === key;
  table.direction = again ? -table.direction : 1;
  table.key = key;
  refreshTable(table);
}

function filterTable(table, test) {
  table.test = test;
  refreshTable(table);
}

function refreshTable(table) {
  const kept = table.run.rollouts.filter(table.test);
  table.rows = table.key ? inOrder(kept, table.key, table.direction) : kept;
  table.count.textContent =
    kept.length === table.run.rollouts.length
      ? counted(kept.length, "rollout")
      : `${kept.length.toLocaleString("en")} of ${counted(table.run.rollouts.length, "rollout")}`;
  for (const cell of table.head.children) {
    const sorted = cell.dataset.key === table.key;
    cell.setAttribute(
      "aria-sort",
      sorted ? (table.direction > 0 ? "ascending" : "descending") : "none",
    );
  }
  table.node.setAttribute("aria-rowcount", table.rows.length + 1);
  table.body.style.height = `${table.rows.length * ROW_HEIGHT}px`;
  table.node.scrollTop = 0;
  drawRows(table);
}

function drawRows(table) {
  const first = Math.max(0, Math.floor(table.node.scrollTop / ROW_HEIGHT) - SPARE_ROWS);
  const count = Math.ceil(table.node.clientHeight / ROW_HEIGHT) + 2 * SPARE_ROWS;
  const shown = table.rows.slice(first, first + count);
  table.body.replaceChildren(...shown.map((row, at) => rowNode(table, row, first + at)));
  if (!table.rows.length)
    table.body.append(
      make(
        "p",
        { class: "muted empty" },
        table.run.rollouts.length ? "No rollout passes the filters." : "This page has no rollouts.",
      ),
    );
}

function rowNode(table, row, place) {
  const cells = table.columns.map((column) => {
    const content = cellOf(row, column);
    const title = typeof content === "string" && !column.right ? content : null;
    return make(
      "div",
      { role: "gridcell", class: column.right ? "numeric number" : "", title },
      content,
    );
  });
  const open = row === table.open;
  const node = make(
    "div",
    {
      role: "row",
      class: open ? "row open" : "row",
      "aria-selected": String(open),
      "aria-rowindex": place + 2,
      "data-number": row.number,
      click: () => table.onOpen(row, { reveal: true }),
    },
    ...cells,
  );
  node.style.top = `${place * ROW_HEIGHT}px`;
  return node;
}

function tableKey(table, event) {
  const move = { ArrowDown: 1, ArrowUp: -1 }[event.key];
  if (move) stepRow(table, move);
  else if (event.key === "Enter" && table.open && event.target === table.node)
    table.onOpen(table.open, { reveal: true });
  else return;
  event.preventDefault();
}

// Opens the row `move` places further down in the table as it is sorted and filtered.
function stepRow(table, move) {
  const at = table.rows.indexOf(table.open);
  const next = at < 0 ? (move > 0 ? 0 : table.rows.length - 1) : at + move;
  if (table.rows[next]) table.onOpen(table.rows[next], {});
}

// Opens the first row of another group, in the order of the table.
function stepGroup(table, move) {
  const start = table.rows.indexOf(table.open);
  let at = start < 0 ? 0 : start;
  while (table.rows[at] && table.rows[at].group === table.open?.group) at += move;
  const group = table.rows[at]?.group;
  if (group)
    table.onOpen(
      table.rows.find((row) => row.group === group),
      { fresh: true },
    );
}

function markOpen(table, row) {
  table.open = row;
  const place = table.rows.indexOf(row);
  const top = place * ROW_HEIGHT;
  const room = table.node.clientHeight - table.head.offsetHeight;
  if (place >= 0 && (top < table.node.scrollTop || top + ROW_HEIGHT > table.node.scrollTop + room))
    table.node.scrollTop = top - room / 2;
  drawRows(table);
}
