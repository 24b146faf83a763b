"""What a student's module may name: the tables that :mod:`grading.policy` reads. Everything not listed is refused.

The utils modules and the names in them are not listed here: they are those that the lab's own modules use.
"""

from __future__ import annotations

import re
from collections.abc import Mapping


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


#: Modules of Python itself that a lab's module may import and use.
STANDARD = _names(
    "__future__ abc array bisect collections collections.abc contextlib copy dataclasses enum fractions functools "
    "heapq itertools math numbers operator random statistics time types typing warnings"
)

#: Packages beyond Python itself. A submodule that is not listed may not be reached, neither by import nor by attribute.
PACKAGES = _names(
    "torch torch.nn torch.nn.functional torch.nn.init torch.nn.parameter torch.nn.utils torch.autograd "
    "torch.autograd.function torch.autograd.graph torch.amp torch.cuda torch.distributed torch.distributed.device_mesh "
    "torch.fft torch.linalg torch.optim torch.optim.lr_scheduler torch.profiler torch.special torch.testing "
    "torch.utils torch.utils.checkpoint torch.version triton triton.language triton.language.math triton.tools "
    "triton.tools.tensor_descriptor triton.language.extra triton.language.extra.libdevice numpy numpy.linalg utils "
    "triton.experimental triton.experimental.gluon triton.experimental.gluon.language "
    "triton.experimental.gluon.language.nvidia triton.experimental.gluon.language.nvidia.hopper "
    "triton.experimental.gluon.language.nvidia.hopper.mbarrier triton.experimental.gluon.language.nvidia.hopper.tma "
    "triton.experimental.gluon.nvidia triton.experimental.gluon.nvidia.hopper"
)

#: Modules that stay out of reach although one of the lab's own modules imports them: they lead out of the lab.
NEVER = _names(
    "argparse asyncio atexit builtins codecs code concurrent ctypes faulthandler gc importlib inspect io linecache "
    "logging marshal mmap multiprocessing os pathlib pickle pkgutil platform posix pty resource runpy select shelve "
    "shutil signal site socket ssl subprocess sys sysconfig tempfile threading traceback tracemalloc unittest urllib "
    "uvicorn zipfile zipimport"
)

#: Where a module does little that a lab needs, the names in it that may be used.
ONLY: Mapping[str, frozenset[str]] = {
    "torch.optim.lr_scheduler": _names("LRScheduler LambdaLR CosineAnnealingLR LinearLR StepLR"),
    "torch.profiler": _names("record_function"),
    "torch.testing": _names("assert_close"),
    "torch.utils": frozenset(),
    "torch.utils.checkpoint": _names("checkpoint"),
    "torch.version": _names("cuda hip"),
    "torch.nn.utils": _names(
        "clip_grad_norm_ clip_grad_value_ clip_grads_with_norm_ get_total_norm parameters_to_vector "
        "vector_to_parameters"
    ),
    "time": _names("monotonic perf_counter perf_counter_ns process_time sleep time"),
    "types": _names("EllipsisType GenericAlias MappingProxyType NoneType TracebackType UnionType"),
    "triton": _names("Config autotune cdiv experimental heuristics jit language next_power_of_2 tools"),
    "triton.experimental": _names("gluon"),
    "triton.experimental.gluon": _names("jit language nvidia"),
    "triton.experimental.gluon.language.nvidia": _names("hopper"),
    "triton.experimental.gluon.nvidia": _names("hopper"),
    "triton.experimental.gluon.nvidia.hopper": _names("TensorDescriptor"),
    "triton.tools": frozenset(),
    "triton.tools.tensor_descriptor": _names("TensorDescriptor"),
    "triton.language.extra": frozenset(),
    "warnings": _names("warn"),
    "utils": frozenset(),
}

#: Functions and classes of allowed modules that reach further than they look. Modules in them need no entry: those that
#: are not in PACKAGES are refused, whatever the installed version has.
EXCEPT: Mapping[str, frozenset[str]] = {
    "contextlib": _names("chdir redirect_stderr redirect_stdout"),
    "copy": _names("replace"),
    "enum": _names("EnumMeta EnumType member nonmember global_enum global_enum_repr global_flag_repr global_str"),
    "functools": _names("singledispatchmethod update_wrapper"),
    "random": _names("SystemRandom"),
    "typing": _names("ForwardRef evaluate_forward_ref get_args get_origin get_type_hints no_type_check_decorator"),
    "numpy": _names(
        "DataSource from_dlpack frombuffer fromfile fromregex genfromtxt get_include load loadtxt memmap save savetxt "
        "savez savez_compressed seterrcall setbufsize show_config"
    ),
    "torch": _names(
        "CallStack Code CompilationUnit DisableTorchFunction DisableTorchFunctionSubclass ExcludeDispatchKeyGuard "
        "FileCheck Storage StorageBase TypedStorage UntypedStorage compile fork frombuffer from_dlpack from_file "
        "get_file_path load prepare_multiprocessing_environment save set_default_device set_default_dtype "
        "set_default_tensor_type set_num_interop_threads set_num_threads set_printoptions set_warn_always typename "
        "use_deterministic_algorithms vitals_enabled wait"
    ),
    "torch.autograd": _names("variable"),
    "torch.autograd.function": _names("FunctionMeta"),
    "torch.cuda": _names("CUDAPluggableAllocator change_current_allocator default_generators"),
    "torch.distributed": _names(
        "FileStore HashStore PrefixStore Store TCPStore breakpoint destroy_process_group init_process_group "
        "monitored_barrier new_subgroups register_rendezvous_handler set_debug_level supports_complex"
    ),
    "triton.language": _names("core"),
}

#: Names that honest code uses, refused since each names an attribute or makes a class by a text: what to write instead.
INSTEAD: Mapping[str, str] = {
    "types.SimpleNamespace": "write a dataclass with these fields, or a named tuple",
    "dataclasses.make_dataclass": "write the class statement, with `@dataclass` above it",
    "functools.singledispatch": "write one function that asks `isinstance(x, ...)`",
    "operator.attrgetter": "write `lambda thing: thing.name`",
    "operator.methodcaller": "write `lambda thing: thing.method()`",
}

#: Whole families of names in ``torch`` that belong to its compilers and its files.
TORCH_MACHINERY = re.compile(r"(Script|PyTorchFile|import_ir|parse_|Serialization|Deserialization|Graph|JIT|cpp|unify)")

#: Names with a leading underscore that PyTorch documents or that labs use.
UNDERSCORED = _names("torch._foreach_add_ torch._foreach_copy_ torch._foreach_mul_ torch._foreach_norm")

#: Words of Python that read, write or run something that the source does not show.
BUILTINS: Mapping[str, str] = {
    "__import__": "write `import` at the top of the module",
    "breakpoint": "a debugger cannot be used while grading: take it out",
    "compile": "a module is graded as it is written: it may not make code from text",
    "delattr": "write `del thing.name`",
    "eval": "a module is graded as it is written: it may not run text as code",
    "exec": "a module is graded as it is written: it may not run text as code",
    "exit": "raise an error, or return",
    "globals": "pass what a function needs as an argument",
    "help": "take it out of the module that you hand in",
    "input": "nobody answers while grading: pass a value as an argument",
    "locals": "use a dictionary of your own",
    "memoryview": "use the tensor's own operators",
    "open": "a lab's module reads and writes no files",
    "quit": "raise an error, or return",
    "vars": "use a dictionary of your own",
    "SystemExit": "raise ValueError or another ordinary error",
    "KeyboardInterrupt": "raise ValueError or another ordinary error",
    "GeneratorExit": "raise ValueError or another ordinary error",
    "BaseExceptionGroup": "raise ValueError or another ordinary error",
    "get_ipython": "a lab's module runs without a notebook too",
}

#: Special methods that a class may define.
SPECIAL_METHODS = _names(
    "__abs__ __add__ __and__ __bool__ __call__ __contains__ __delitem__ __divmod__ __enter__ __eq__ __exit__ "
    "__float__ __floordiv__ __format__ __ge__ __getitem__ __gt__ __hash__ __iadd__ __iand__ __imul__ __index__ "
    "__init__ __int__ __invert__ __ior__ __isub__ __iter__ __le__ __len__ __lt__ __matmul__ __mod__ __mul__ __ne__ "
    "__neg__ __new__ __next__ __or__ __pos__ __post_init__ __pow__ __radd__ __rand__ __repr__ __reversed__ "
    "__rfloordiv__ __rmatmul__ __rmod__ __rmul__ __ror__ __round__ __rpow__ __rsub__ __rtruediv__ __rxor__ "
    "__setitem__ __str__ __sub__ __truediv__ __xor__"
)

#: Special attributes that may be read; of these ``__class__`` only for its name.
SPECIAL_ATTRIBUTES = SPECIAL_METHODS | _names("__class__ __doc__ __name__ __qualname__")

#: Special names that may stand alone.
SPECIAL_NAMES = _names("__all__ __author__ __debug__ __doc__ __name__ __slots__ __version__")

#: Those that a module may set: not ``__name__``, since nothing under ``if __name__ == "__main__"`` is read.
MAY_BE_SET = SPECIAL_NAMES - {"__name__"} | {"__hash__"}

#: Attributes of frames, tracebacks, generators, code, functions and classes: through them one reaches anything.
INTERNALS = _names(
    "ag_await ag_code ag_frame co_code co_consts co_names cr_await cr_code cr_frame cr_origin ctypes f_back f_builtins "
    "f_code f_globals f_lasti f_lineno f_locals f_trace func_globals gi_code gi_frame gi_yieldfrom mro settrace "
    "setprofile tb_frame tb_lasti tb_lineno tb_next tofile fromfile get_ipython _C _ops _getframe _get_backend"
)

#: Attributes that give the bare memory of a tensor: allowed only in a lab whose own modules use them.
BARE_MEMORY = _names("untyped_storage storage typed_storage _cdata share_memory_")

#: Attributes whose use is judged where it stands, so that no text or pattern may name them.
AS_WRITTEN = _names("__class__ __dict__ format format_map")

#: What changes the function or class that it is given: it stands above one of the module's own.
DECORATORS = _names(
    "abc.update_abstractmethods dataclasses.dataclass functools.total_ordering functools.wraps triton.jit "
    "triton.runtime.jit triton.experimental.gluon.jit typing.final"
)

#: The decorators that make a kernel.
JIT = _names("triton.jit triton.runtime.jit triton.experimental.gluon.jit")

#: Classes that make a class when they are called with a table of names.
ENUMERATIONS = _names("enum.Enum enum.Flag enum.IntEnum enum.IntFlag enum.ReprEnum enum.StrEnum")

#: Abstract classes by which others ask what a value is: nobody tells them of one more kind.
ABSTRACT = frozenset(
    [*(f"numbers.{name}" for name in ("Complex", "Integral", "Number", "Rational", "Real"))]
    + [f"collections.abc.{name}" for name in ("Callable", "Iterable", "Mapping", "Sequence", "Set", "Sized")]
)

#: Types whose values are compared and written down as they are: a subclass could say that it equals anything.
PLAIN_TYPES = _names(
    "bool bytes complex dict float frozenset int list object_ set str tuple Tensor Parameter ndarray Fraction IntEnum "
    "IntFlag NamedTuple ReprEnum Size StrEnum"
)

#: Special methods that say nothing of what such a value equals.
HARMLESS = _names("__init__ __new__ __post_init__ __repr__ __str__")

#: The same for a tuple, which is compared by its parts.
ARITHMETIC = _names("__add__ __and__ __matmul__ __mod__ __mul__ __or__ __pow__ __radd__ __rmul__ __sub__ __truediv__")

#: Methods by which others look at a tensor.
LOOKS = _names(
    "clone contiguous cpu cuda data_ptr detach dim double element_size equal float half is_contiguous item numel numpy "
    "reshape size stride sum to tolist untyped_storage view"
)
