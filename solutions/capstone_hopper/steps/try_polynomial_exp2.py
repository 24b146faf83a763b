"""A try beside step 11: every fourth power of two by a polynomial, on the multiply-add units."""

from . import patch

BASE = "step11_persistent.py"
EDITS = (
    (
        "def online_softmax",
        '''\
def powers(x):
    """2^x for x <= 0, to 8e-5 of it or of 2^-126: three of four by the special function unit, one from 2^n p(x - n).

    Adding 1.5 * 2^23 rounds x to the whole number n, which then stands in the lowest bits; p is of degree 3, with the
    smallest relative error on [-1/2, 1/2].
    """
    return tl.inline_asm_elementwise(
        """{
        .reg .f32 a, b, c, x, r, n, f, p;
        .reg .b32 t;
        ex2.approx.ftz.f32 a, $4;
        ex2.approx.ftz.f32 b, $5;
        ex2.approx.ftz.f32 c, $6;
        max.ftz.f32 x, $7, 0fC2FC0000;
        add.ftz.f32 r, x, 0f4B400000;
        sub.ftz.f32 n, r, 0f4B400000;
        sub.ftz.f32 f, x, n;
        fma.rn.ftz.f32 p, f, 0f3D61FBB0, 0f3E786F0E;
        fma.rn.ftz.f32 p, p, f, 0f3F31798D;
        fma.rn.ftz.f32 p, p, f, 0f3F7FFB49;
        mov.b32 t, r;
        shl.b32 t, t, 23;
        mov.f32 $0, a;
        mov.f32 $1, b;
        mov.f32 $2, c;
        { .reg .b32 u; mov.b32 u, p; add.s32 u, u, t; mov.b32 $3, u; }
        }""",
        "=f,=f,=f,=f,f,f,f,f", [x], tl.float32, is_pure=True, pack=4,
    )  # fmt: skip


@gluon.jit
def online_softmax''',
    ),
    ("weights = tl.exp2(", "weights = powers("),
)

patch.run(__file__, globals())
