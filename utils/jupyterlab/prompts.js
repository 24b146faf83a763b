/* Prompts in JupyterLab: they take a guess before what answers them shows. */

const { mount, parse } = root.MLF.predict;
const PROMPT = /<!--\s*(predict\s[^]*?)\s*-->\s*$/;
const HELD = "predict-held";

function watchPrompts(panel, showAll) {
  const notebook = panel.content;
  const prompts = new Map(); // a cell with a prompt -> {mark, box, shown, held, hidden}
  let waiting = false;

  function schedule() {
    if (waiting || notebook.isDisposed) return;
    waiting = true;
    requestAnimationFrame(() => {
      waiting = false;
      if (!notebook.isDisposed) refresh();
    });
  }

  /** Bring forms and hidden cells up to what the cells hold now. */
  function refresh() {
    const cells = notebook.widgets;
    const hidden = new Set();
    for (const [cell, prompt] of prompts) if (!cells.includes(cell) || markOf(cell) !== prompt.mark) remove(cell, prompt);
    cells.forEach((cell, k) => {
      const mark = markOf(cell);
      if (mark === null) return;
      const until = cells.findIndex((other, n) => n > k && other.model.type === "markdown");
      const prompt = prompts.get(cell) || add(cell, mark);
      const from = parse(mark).name.startsWith("lab") ? until : k + 1; // a lab's cells before the answer check code
      prompt.held = until < 0 ? [] : cells.slice(from, until + 1);
      prompt.shown.refresh();
      if (prompt.hidden) prompt.held.forEach((other) => hidden.add(other));
    });
    for (const cell of cells) cell.toggleClass(HELD, hidden.has(cell));
  }

  function markOf(cell) {
    if (cell.model.type !== "markdown") return null;
    const found = PROMPT.exec(cell.model.sharedModel.getSource());
    return found && parse(found[1]) ? found[1] : null;
  }

  function add(cell, mark) {
    const box = document.createElement("div");
    const prompt = { mark, box, held: [], hidden: true };
    const drawn = () => cell.node.querySelector(".jp-RenderedMarkdown");
    prompts.set(cell, prompt);
    cell.node.append(box);
    box.addEventListener("dblclick", (event) => event.stopPropagation()); // it would open the cell's source
    prompt.shown = mount({
      mark,
      box,
      list: () => cell.node.querySelector(".jp-RenderedMarkdown > ul:last-child"),
      asking: () => (drawn() ? [...drawn().children] : []),
      hold: (hidden) => {
        if (hidden !== prompt.hidden) schedule();
        prompt.hidden = hidden;
      },
      more: () => {
        const button = document.createElement("button");
        Object.assign(button, { type: "button", className: "predict-plain predict-more", textContent: "Your predictions" });
        button.addEventListener("click", showAll);
        return button;
      },
      after: () => {
        refresh();
        if (prompt.held.length) notebook.activeCellIndex = notebook.widgets.indexOf(cell) + 1;
        notebook.mode = "command";
        notebook.activate();
      },
    });
    return prompt;
  }

  function remove(cell, prompt) {
    prompt.box.remove();
    prompts.delete(cell);
  }

  /** Who runs a cell and comes to one that is held back is asked first. */
  function entered() {
    for (const prompt of prompts.values()) {
      if (prompt.hidden && prompt.held.includes(notebook.activeCell)) {
        requestAnimationFrame(() => {
          prompt.box.scrollIntoView({ block: "nearest" });
          prompt.shown.focus();
        });
      }
    }
  }

  const observer = new MutationObserver(schedule); // cells come into view, are added, moved and drawn anew
  observer.observe(notebook.node, { childList: true, subtree: true });
  notebook.activeCellChanged.connect(entered);
  root.addEventListener("mlf-predictions", schedule);
  root.addEventListener("storage", schedule);
  panel.disposed.connect(() => {
    observer.disconnect();
    root.removeEventListener("mlf-predictions", schedule);
    root.removeEventListener("storage", schedule);
  });
  panel.context.ready.then(schedule);
}
