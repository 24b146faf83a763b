/* A cell that takes long says how long it has been running, and how far it is where the course's code tells (utils/progress.py).
   None of this is an output: nothing is stored. */

/** Seconds before a cell says so. */
const LONG = 2;
const TARGET = "making-llms-fast.progress";

function watchRunning(panel) {
  const notebook = panel.content;
  const line = document.createElement("div");
  line.className = "course-running";
  line.setAttribute("role", "status");
  let [cell, since, told] = [null, 0, null];

  const runs = (each) => each.model.type === "code" && each.model.executionState === "running";

  function draw() {
    const now = notebook.isDisposed || !notebook.isVisible ? null : notebook.widgets.find(runs) || null;
    if (now !== cell) {
      line.remove();
      [cell, since, told] = [now, Date.now(), null];
    }
    const seconds = Math.floor((Date.now() - since) / 1000);
    if (!cell || seconds < LONG) return;
    const clock = seconds < 60 ? `${seconds} s` : `${Math.floor(seconds / 60)} min ${seconds % 60} s`;
    line.textContent = `running for ${clock}${told ? ` · ${told.what} ${told.done} of ${told.total}` : ""}`;
    line.style.setProperty("--done", told ? `${(100 * told.done) / told.total}%` : "0%");
    if (line.parentElement !== cell.node) cell.node.append(line);
  }

  const listen = (kernel) => {
    if (!kernel) return;
    kernel.registerCommTarget(TARGET, (comm) => {
      comm.onMsg = (message) => {
        told = message.content.data;
      };
    });
  };
  panel.sessionContext.kernelChanged.connect((_, { newValue }) => listen(newValue));
  if (panel.sessionContext.session) listen(panel.sessionContext.session.kernel);
  const timer = setInterval(draw, 500);
  panel.disposed.connect(() => clearInterval(timer));
}
