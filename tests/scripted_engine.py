"""An engine for tests of what stands around it: it says what it is told, when it is told, and fails on demand."""

import threading
from types import SimpleNamespace


class Scripted:
    """Gives every request the tokens of ``text``, one a tick.

    ``free_running``: every step is a tick. Otherwise a step waits for :meth:`tick`, ``patience`` seconds at most. A
    prompt that begins with a token of ``poisoned`` fails in its second step, as a request does that breaks within the
    model.
    """

    def __init__(self, text=(5, 6, 7, 8), *, free_running=True, most=100, poisoned=(), patience=10.0):
        self.text, self.most, self.poisoned = list(text), most, set(poisoned)
        self.requests, self.aborted, self.added = {}, [], []
        self.free_running, self._ticks = free_running, threading.Semaphore(0)
        self.someone_gone, self.someone_came = threading.Event(), threading.Event()
        self.failing_steps, self.patience = 0, patience
        self.history = []

    def tick(self, count=1):
        for _ in range(count):
            self._ticks.release()

    def add(self, prompt, params=None, *, id=None):
        if 0 in prompt:
            raise ValueError("token 0 is not welcome")
        if len(self.requests) >= self.most:
            raise RuntimeError(f"{len(self.requests)} requests wait")
        self.requests[id] = SimpleNamespace(prompt=list(prompt), params=params, given=0)
        self.added.append((list(prompt), params))
        self.someone_came.set()
        return id

    def abort(self, id):
        self.aborted.append(id)
        known = self.requests.pop(id, None) is not None
        self.someone_gone.set()
        return known

    @property
    def has_work(self):
        return bool(self.requests)

    def step(self):
        if not self.free_running:
            self._ticks.acquire(timeout=self.patience)
        if self.failing_steps:
            self.failing_steps -= 1
            raise OSError("the machine is on fire")
        outputs = []
        for id, request in list(self.requests.items()):
            request.given += 1
            failed = request.given == 2 and request.prompt[0] in self.poisoned
            last = request.given == min(len(self.text), request.params.max_new_tokens)
            reason = "error" if failed else "length" if last else None
            new = [] if failed else [self.text[request.given - 1]]
            error = "the model failed: it cannot say that" if failed else None
            outputs.append(
                SimpleNamespace(
                    id=id, new_tokens=new, finished=reason is not None, finish_reason=reason, error=error
                )
            )  # fmt: skip
            if reason:
                del self.requests[id]
        return outputs

    def stats(self):
        return {"running": len(self.requests)}
