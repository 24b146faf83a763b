"""Wrong answers to exercise 4.9, the step of a pipeline: edits of the plain answers."""

from __future__ import annotations

from .right import ANSWERS

wrong = ANSWERS.wrong
STEP, FORWARD, BACKWARD = "4.9: one step", "4.9: a micro-batch forward", "4.9: a micro-batch backward"
END = "end = (y if self.weights[i] else y.nan_to_num(0)) * self.weights[i]"
EDGE = "get_gradient_edge(y)"
wrong(
    FORWARD,
    "activation without a gradient",
    "NoneType",
    "it must require a gradient before the forward pass",
    '"classic wrong answers" 1',
    edits={"x.requires_grad = True": "pass"},
    also={BACKWARD: {"torch.zeros_like(x) if x.grad is None else x.grad": "x.grad"}},
)
wrong(
    FORWARD,
    "zeros for the stage before",
    "it must require a gradient before the forward pass",
    '"classic wrong answers" 1',
    edits={"x.requires_grad = True": "pass"},
)
wrong(
    BACKWARD,
    "gradient not handed on",
    "KeyError",
    '"classic wrong answers" 2',
    edits={'self.made["gradient", i] =': "handed_on ="},
)
wrong(
    FORWARD,
    "activation for the first stage",
    "no activation comes to the first stage",
    '"classic wrong answers" 2',
    edits={"if self.stage.first:": "if False:"},
)
wrong(
    BACKWARD,
    "gradient for the last stage",
    "no gradient to the last",
    '"classic wrong answers" 2',
    edits={"if self.stage.last:": "if False:"},
)
wrong(STEP, "nothing exchanged", "KeyError", '"classic wrong answers" 2', edits={"run.exchange(item)": "pass"})
wrong(
    BACKWARD,
    "gradient left behind",
    "on a stage in the middle from its output and the gradient that comes",
    '"classic wrong answers" 3',
    edits={"torch.autograd.backward(end, gradient)": "torch.autograd.backward(end)"},
    also={FORWARD: {EDGE: "y"}},
)
wrong(
    FORWARD,
    "sum of means",
    "this is the sum of the micro-batches' means",
    '"classic wrong answers" 4',
    edits={END: "end = y"},
)
wrong(
    FORWARD,
    "mean of means",
    "this is the mean of the micro-batches' means",
    '"classic wrong answers" 4',
    edits={END: "end = y / len(self.tokens)"},
)
wrong(
    FORWARD,
    "last loss alone",
    "this is the last micro-batch's share alone",
    '"classic wrong answers" 4',
    edits={" + (0 if self.loss is None else self.loss)": ""},
)
wrong(
    FORWARD,
    "backward from the mean",
    "the backward pass starts from another one",
    '"classic wrong answers" 4',
    edits={"self.in_flight[i] = (x, end)": "self.in_flight[i] = (x, y if self.stage.last else end)"},
)
wrong(
    FORWARD,
    "mean over nothing",
    "a micro-batch without targets has a mean over nothing",
    '"classic wrong answers" 4',
    edits={END: "end = y * self.weights[i]"},
)
wrong(
    BACKWARD,
    "never out of flight",
    "the schedule ended before the backward pass of micro-batches",
    '"classic wrong answers" 5',
    edits={"self.in_flight.pop(i)": "self.in_flight[i]"},
)
wrong(
    FORWARD,
    "loss with its graph",
    "the loss that is returned has a graph",
    '"classic wrong answers" 5',
    edits={"end.detach()": "end"},
)
wrong(
    BACKWARD,
    "no backward pass",
    "no backward pass runs through this stage's graph",
    edits={"torch.autograd.backward(end, gradient)": "pass"},
)
wrong(
    FORWARD,
    "outputs kept",
    "still holds",
    "get_gradient_edge",
    '"classic wrong answers" 5',
    edits={EDGE: "y"},
)
wrong(
    FORWARD,
    "inputs kept",
    "stage 1 keeps",
    "inputs at once",
    '"classic wrong answers" 5',
    edits={"self.in_flight[i] = (x, end)": "self.in_flight[i] = (x, end); self.made[None, i] = x"},
)
wrong(
    FORWARD,
    "activation left in received",
    "entries in received: ('activation', 0)",
    "is taken out of self.received (pop)",
    '"classic wrong answers" 5',
    edits={'self.received.pop(("activation", i))': 'self.received["activation", i]'},
)
wrong(
    BACKWARD,
    "gradient left in received",
    "entries in received: ('gradient', 0)",
    "is taken out of self.received (pop)",
    '"classic wrong answers" 5',
    edits={'self.received.pop(("gradient", i))': 'self.received["gradient", i]'},
)
wrong(
    FORWARD,
    "an edge of a frozen stage",
    "its micro-batch's end is None",
    edits={" if y.requires_grad else None": ""},
)
wrong(
    FORWARD,
    "no loss",
    "on the last stage self.loss adds up the weighted losses",
    '"classic wrong answers" 4',
    edits={"self.loss = ": "_ = "},
)
wrong(
    BACKWARD,
    "newest first",
    "B i goes backward through F i's graph",
    '"classic wrong answers" 6',
    edits={"x, end = self.in_flight.pop(i)": "x, end = self.in_flight.popitem()[1]"},
)
wrong(
    FORWARD,
    "input and end exchanged",
    "starts where its forward pass has ended",
    '"classic wrong answers" 3',
    edits={"self.in_flight[i] = (x, end)": "self.in_flight[i] = (end, x)"},
)
