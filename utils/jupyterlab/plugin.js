/* The course in JupyterLab. The extension changes no notebook: what it draws and hides is no part of the document. It is put
   together by utils/jupyterlab/__init__.py, with NAME, STYLE and NOTEBOOKS in front; this file comes last. It makes what
   webpack would make of an extension: a container that JupyterLab loads. */

/** Keys typed within what suppresses JupyterLab's shortcuts go there. JupyterLab looks for that mark from the focused
    element up to the one that a shortcut is for, which in a notebook is the focused element itself: it must have the mark. */
function keepKeys({ target }) {
  const mark = "data-lm-suppress-shortcuts";
  if (target.closest && target.closest(`[${mark}]`)) target.setAttribute(mark, "true");
}

function plugin({ INotebookTracker }, { ICommandPalette, MainAreaWidget }, { IMainMenu }, { Widget }) {
  return {
    id: `${NAME}:plugin`,
    autoStart: true,
    requires: [INotebookTracker],
    optional: [ICommandPalette, IMainMenu],
    activate(app, tracker, palette, menu) {
      document.head.append(Object.assign(document.createElement("style"), { textContent: STYLE }));
      root.addEventListener("keydown", keepKeys, true);
      const command = `${NAME}:predictions`;
      const showAll = () => app.commands.execute(command);
      const watch = (panel) => {
        keepClean(panel);
        watchPrompts(panel, showAll);
        watchLinks(app, panel);
        watchRunning(panel);
      };
      tracker.forEach(watch);
      tracker.widgetAdded.connect((_, panel) => watch(panel));

      app.commands.addCommand(command, {
        label: "Your Predictions",
        caption: "How your guesses in the lectures fared",
        execute: () => {
          const content = new Widget();
          content.addClass("predict-report");
          const list = document.createElement("div");
          content.node.append(list);
          const stop = root.MLF.predict.report(list);
          const widget = new MainAreaWidget({ content });
          widget.id = `${NAME}-predictions-${Date.now()}`;
          widget.title.label = "Your predictions";
          widget.title.closable = true;
          widget.disposed.connect(stop);
          app.shell.add(widget, "main", { mode: "split-right" });
        },
      });
      if (palette) palette.addItem({ command, category: "Course" });
      if (menu) menu.helpMenu.addGroup([{ command }], 0);
    },
  };
}

let scope = null;
const shared = async (name) => (await Object.values(scope[name])[0].get())();

root._JUPYTERLAB = root._JUPYTERLAB || {};
root._JUPYTERLAB[NAME] = {
  init(given) {
    scope = given;
  },
  async get() {
    const names = ["@jupyterlab/notebook", "@jupyterlab/apputils", "@jupyterlab/mainmenu", "@lumino/widgets"];
    const made = plugin(...(await Promise.all(names.map(shared))));
    return () => ({ __esModule: true, default: made });
  },
};
