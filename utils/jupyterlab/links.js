/* A lab opens with its module beside it, modules open there, other lectures and labs that a text names are links, and a
   notebook that nobody changed counts as saved. */

const MODULE = /\]\((\w+\.py)\)/;
const MENTION = /\b(notebook|lecture|lab)s?\s(\d\d?)\b(?!\.\d)/gi;
/** Narrower windows do not hold two panes. */
const WIDE = 1000;

const folderOf = (path) => path.slice(0, path.lastIndexOf("/") + 1);
const editors = (app) => [...app.shell.widgets("main")].filter((widget) => widget.context && /\.py$/.test(widget.context.path));

/** Open a module in the pane beside a notebook; one that is open already comes to the front. */
function openBeside(app, panel, path) {
  const there = editors(app).find((widget) => !widget.isDisposed);
  const options = there ? { mode: "tab-after", ref: there.id } : { mode: "split-right", ref: panel.id };
  return app.commands.execute("docmanager:open", { path, factory: "Editor", options });
}

/** The first time that a lab is opened, the module of its first exercise stands beside it. */
async function openFirstModule(app, panel) {
  await Promise.all([panel.context.ready, app.restored, panel.revealed]);
  const folder = folderOf(panel.context.path);
  if (panel.isDisposed || root.innerWidth < WIDE || editors(app).some((widget) => folderOf(widget.context.path) === folder)) return;
  const texts = panel.content.widgets.filter((cell) => cell.model.type === "markdown").map((cell) => cell.model.sharedModel.getSource());
  const found = texts.map((text) => (/^## Exercise/m.test(text) ? MODULE.exec(text) : null)).find(Boolean);
  if (!found) return;
  await openBeside(app, panel, folder + found[1]);
  app.shell.activateById(panel.id);
}

/** Make a link of each lecture or lab that a drawn text names. */
function linkMentions(drawn, base, own) {
  const texts = document.createTreeWalker(drawn, NodeFilter.SHOW_TEXT, (node) =>
    node.parentElement.closest("a, pre, code, h1, h2, h3, h4, mjx-container") ? NodeFilter.FILTER_REJECT : NodeFilter.FILTER_ACCEPT);
  const found = [];
  while (texts.nextNode()) if (new RegExp(MENTION).test(texts.currentNode.data)) found.push(texts.currentNode);
  for (const text of found) {
    const parts = [];
    let end = 0;
    for (const mention of text.data.matchAll(MENTION)) {
      const name = /^lab/i.test(mention[1]) ? `lab ${mention[2]}` : `notebook ${mention[2]}`;
      const path = NOTEBOOKS[name];
      if (!path || base + path === own) continue;
      const link = document.createElement("a");
      Object.assign(link, { href: "#", textContent: mention[0], className: "course-mention" });
      link.dataset.path = base + path;
      parts.push(text.data.slice(end, mention.index), link);
      end = mention.index + mention[0].length;
    }
    if (parts.length) text.replaceWith(...parts, text.data.slice(end));
  }
}

function watchLinks(app, panel) {
  const { node } = panel.content;
  openFirstModule(app, panel);

  node.addEventListener("click", (event) => {
    const link = event.target.closest("a");
    if (!link) return;
    const target = link.dataset.path || pathOf(link);
    if (!link.dataset.path && !/\.py$/.test(target)) return;
    event.preventDefault();
    event.stopPropagation();
    if (link.dataset.path) app.commands.execute("docmanager:open", { path: target });
    else openBeside(app, panel, target);
  }, true);

  let waiting = false;
  const refresh = () => {
    waiting = false;
    const found = /^(.*?)(?:notebooks|labs|solutions)\//.exec(panel.context.path);
    for (const drawn of found ? node.querySelectorAll(".jp-RenderedMarkdown:not([data-course])") : []) {
      if (!drawn.childElementCount) continue;
      drawn.dataset.course = "linked"; // a text that is drawn anew loses its children, not this: see below
      linkMentions(drawn, found[1], panel.context.path);
    }
  };
  const observer = new MutationObserver((changes) => {
    for (const { target, addedNodes } of changes) {
      const fresh = addedNodes.length && target.dataset && target.dataset.course && !target.querySelector(".course-mention");
      if (fresh) delete target.dataset.course;
    }
    if (!waiting) requestAnimationFrame(refresh);
    waiting = true;
  });
  observer.observe(node, { childList: true, subtree: true });
  panel.disposed.connect(() => observer.disconnect());
}

/** The path within the course's folder that a link of a text leads to; "" for any other. */
function pathOf(link) {
  const found = /^[^?#]*\/files\/([^?#]+)/.exec(link.href.startsWith(root.location.origin) ? link.href : "");
  return found ? decodeURIComponent(found[1]) : "";
}

/** JupyterLab writes the kernel's version into a notebook that it opens; that alone leaves nothing to save. */
async function keepClean(panel) {
  await panel.context.ready;
  const { model } = panel.content;
  const stored = JSON.stringify(model.toJSON().cells);
  const look = () => {
    if (!model.dirty) return;
    if (JSON.stringify(model.toJSON().cells) === stored) model.dirty = false;
    else model.stateChanged.disconnect(look);
  };
  model.stateChanged.connect(look);
  look();
}
