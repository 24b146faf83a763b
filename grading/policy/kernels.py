"""Rules of Triton kernels."""

from __future__ import annotations

import ast

from grading.policy.judge import Judge
from grading.policy.scopes import LOCAL, Scope


class KernelRules(Judge):
    """What a kernel may name."""

    def _judge_kernel(self, kernel: ast.FunctionDef, scope: Scope) -> None:
        """A kernel computes by itself: on a GPU it could not call PyTorch, in the interpreter nobody would notice."""
        for node in (inner for statement in kernel.body for inner in ast.walk(statement)):
            path = scope.path_of(node) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load) else None
            if path and path.split(".")[0] in ("torch", "numpy", "utils"):
                why = "a kernel is written in triton.language alone: what it needs is passed to it"
                self._refuse(node, f"`{node.id}` in the kernel `{kernel.name}`", why)
            elif path == LOCAL and self._is_python(node.id, scope):
                why = "a kernel calls kernels (@triton.jit) and triton.language, and uses tl.constexpr from outside"
                self._refuse(node, f"`{node.id}` in the kernel `{kernel.name}`", why)

    def _is_python(self, name: str, scope: Scope) -> bool:
        """Whether a name that a kernel uses stands for a Python object of the module that is no kernel nor constant."""
        module = scope
        while module.outer is not None:
            if name in module.bound:
                return False
            module = module.outer
        node = module.made.get(name)
        if isinstance(node, ast.FunctionDef):
            return not any(is_jit(decorator, module) for decorator in node.decorator_list)
        return isinstance(node, ast.List | ast.Dict | ast.Lambda | ast.ClassDef | ast.ListComp | ast.DictComp)


def is_jit(decorator: ast.expr, scope: Scope) -> bool:
    called = decorator.func if isinstance(decorator, ast.Call) else decorator
    return scope.path_of(called) in ("triton.jit", "triton.runtime.jit")
