"""The neutral vocabulary: what every operation of a recorded program is called, and what it means.

A wing records a program as a `Graph` whose nodes carry these names, operands and attributes; from
there on no framework is needed. The table below is the contract. Each entry names the operands
in order, the attributes, and the meaning; ``?`` marks what may be left out, ``*`` what repeats.

Conventions that hold everywhere:

- Axes are counted from 0 and never negative. ``axes`` is a tuple, ``axis`` one number.
- ``axes`` that may be left out are then all axes.
- ``keep`` (default False) keeps a reduced axis with length 1.
- Elementwise operations broadcast as in NumPy; a number is a node ``constant``.
- Numbers are exact: everything is evaluated in float64 and complex128, integers in int64.
- Indices are not negative and within bounds.
- An operation that is not in the table keeps its native name. It is shown with a mark, and
  evaluated only if its attributes hold a NumPy ``function`` (and ``adjoint``, see ``opaque``).
- Attributes that are not in the table, or needed ones that are missing, are refused.
- The residuals of a ``custom_rule`` are differentiated through its forward program.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Operation:
    """An operation of the vocabulary.

    Attributes:
        name: What a node's ``operation`` says.
        operands: The node's inputs, in order.
        attributes: The names of the node's attributes; those with a ``?`` may be left out.
        meaning: The result, in mathematics or in NumPy's words.
        outputs: What comes out, where it is more than one array.
    """

    name: str
    operands: str
    attributes: tuple[str, ...]
    meaning: str
    outputs: str = ""


def _table(text: str) -> dict[str, Operation]:
    """Read lines ``name | operands | attributes | meaning | outputs?``; indented ones go on."""
    table = {}
    for line in text.strip().replace("\n    ", " ").splitlines():
        name, operands, attributes, meaning, *rest = (part.strip() for part in line.split("|"))
        table[name] = Operation(
            name, operands, tuple(attributes.split()), meaning, rest[0] if rest else ""
        )
    return table


_LEAVES = """
constant      |         | value          | a number or an array that the program holds
iota          |         | shape axis     | counts 0, 1, 2, ... along axis
random        |         | name? value?   | a draw, seen as a named constant; value as it was drawn
identity      | x       |                | x; also copies and aliases
stop          | x       |                | x, with no derivative
cast          | x       | dtype          | x in another dtype; to integers it truncates
"""

_ELEMENTWISE = """
negate        | x       |                | -x
exp           | x       |                | e**x
exp2          | x       |                | 2**x
expm1         | x       |                | e**x - 1
log           | x       |                | natural logarithm
log2          | x       |                | logarithm to base 2
log10         | x       |                | logarithm to base 10
log1p         | x       |                | log(1 + x)
sqrt          | x       |                | square root
rsqrt         | x       |                | 1 / sqrt(x)
cbrt          | x       |                | real cube root
square        | x       |                | x * x (a complex x is not conjugated)
reciprocal    | x       |                | 1 / x
sin           | x       |                | sine
cos           | x       |                | cosine
tan           | x       |                | tangent
sinh          | x       |                | hyperbolic sine
cosh          | x       |                | hyperbolic cosine
tanh          | x       |                | hyperbolic tangent
arcsin        | x       |                | inverse of sin
arccos        | x       |                | inverse of cos
arctan        | x       |                | inverse of tan
arcsinh       | x       |                | inverse of sinh
arccosh       | x       |                | inverse of cosh
arctanh       | x       |                | inverse of tanh
sigmoid       | x       |                | 1 / (1 + e**-x)
log_sigmoid   | x       |                | log(sigmoid(x))
softplus      | x       | beta?          | log(1 + e**(beta x)) / beta; beta = 1
relu          | x       |                | max(x, 0)
leaky_relu    | x       | slope          | x where x > 0, else slope * x
elu           | x       | alpha?         | x where x > 0, else alpha (e**x - 1); alpha = 1
gelu          | x       | approximate?   | x Phi(x); approximate = True is the form with tanh
silu          | x       |                | x sigmoid(x)
erf           | x       |                | error function
erfc          | x       |                | 1 - erf(x)
erfinv        | x       |                | inverse of erf
lgamma        | x       |                | log abs Gamma(x)
digamma       | x       |                | derivative of lgamma
polygamma     | x       | order          | order-th derivative of digamma
abs           | x       |                | modulus
sign          | x       |                | x / abs(x), 0 at 0
floor         | x       |                | round down
ceil          | x       |                | round up
round         | x       |                | to the nearest integer, ties to even
trunc         | x       |                | round towards 0
real          | x       |                | real part
imag          | x       |                | imaginary part
conj          | x       |                | complex conjugate
angle         | x       |                | argument of a complex number
is_finite     | x       |                | boolean
is_nan        | x       |                | boolean
logical_not   | x       |                | boolean
clip          | x       | low? high?     | min(max(x, low), high); numbers or None
add           | a b     |                | a + b
subtract      | a b     |                | a - b
multiply      | a b     |                | a * b, elementwise
divide        | a b     |                | a / b
power         | a b     |                | a ** b
remainder     | a b     |                | a - b floor(a / b)
floor_divide  | a b     |                | floor(a / b)
maximum       | a b     |                | elementwise
minimum       | a b     |                | elementwise
arctan2       | a b     |                | angle of b + i a
logaddexp     | a b     |                | log(e**a + e**b)
complex       | re im   |                | re + i im
compare       | a b     | relation       | boolean; one of "<" "<=" ">" ">=" "==" "!="
logical_and   | a b     |                | boolean
logical_or    | a b     |                | boolean
logical_xor   | a b     |                | boolean
where         | c a b   |                | a where c, else b
"""

_SHAPES = """
transpose     | x       | permutation    | numpy.transpose
reshape       | x       | shape          | row-major; also flatten, squeeze, unsqueeze
broadcast     | x       | shape axes?    | axis i of x becomes axes[i]; default the last ones
concatenate   | *x      | axis           | numpy.concatenate
stack         | *x      | axis           | numpy.stack
split         | x       | sizes axis     | consecutive parts, as many as sizes | part*
slice         | x       | start limit stride?      | one number for each axis; stride > 0
pad | x | low high interior? value? |
    as in jax.lax.pad; negative low, high cut off
flip          | x       | axes           | reversed
roll          | x       | shifts axes    | numpy.roll
triangle      | x       | upper offset?  | triu or tril of the last two axes
diagonal      | x       | offset? axes?  | numpy.diagonal; axes default to the last two
diagonal_matrix | x     | offset?        | the last axis becomes a diagonal
"""

_INDEXING = """
index | x *i | axes |
    integer arrays i at axes; their axes lead, the others follow
take_along    | x i     | axis           | numpy.take_along_axis; i has the rank of x
scatter | x u *i | axes mode |
    index(x, *i) is replaced by u ("set") or has u added ("add")
scatter_along | x i u   | axis mode      | the same for take_along
dynamic_slice | x *s | sizes |
    a window that starts at the integers s, one for each axis
dynamic_update | x u *s |                | that window replaced by u
one_hot       | i       | size           | a new last axis: 1 at i, 0 elsewhere
sort          | x       | axis descending?  | values, and where they stood | values indices
argsort       | x       | axis descending?  | integers
topk          | x       | k axis largest?   | sorted, and where they stood | values indices
"""

_REDUCTIONS = """
sum           | x       | axes? keep?     | sum over axes
mean          | x       | axes? keep?     | mean over axes
prod          | x       | axes? keep?     | product over axes
max           | x       | axes? keep?     | greatest over axes
min           | x       | axes? keep?     | least over axes
argmax        | x       | axis keep?     | integer
argmin        | x       | axis keep?     | integer
any           | x       | axes? keep?     | boolean
all           | x       | axes? keep?     | boolean
logsumexp     | x       | axes? keep?     | log of the sum of exponentials
variance      | x       | axes? correction? keep?  | sum abs(x - mean)**2 / (n - correction); 0
deviation     | x       | axes? correction? keep? eps?  | sqrt(variance + eps)
norm | x | axes? ord? keep? |
    (sum | x | **ord)**(1/ord); ord = 2, or 1, inf, any number
cumsum        | x       | axis reverse?  | running sum
cumprod       | x       | axis reverse?  | running product
cummax        | x       | axis reverse?  | running maximum
cummin        | x       | axis reverse?  | running minimum
logcumsumexp  | x       | axis reverse?  | log of the running sum of exponentials
"""

_CONTRACTIONS = """
einsum | *x | subscripts |
    numpy.einsum with "->" and no "..."; no label twice in the result
matmul        | a b     |                | numpy.matmul
outer         | a b     |                | numpy.outer of two vectors
trace         | x       |                | of the last two axes
cross         | a b     | axis           | numpy.cross along an axis of length 3
"""

_LAYERS = """
convolution | x w | stride? padding? dilation? input_dilation? groups? |
    correlation; x: N, C, spatial; w: O, C/groups, spatial; padding ((low, high), ...)
convolution_transposed | x w | stride? padding? output_padding? dilation? groups? |
    torch's conv_transpose; w: C, O/groups, spatial; padding one number for each spatial
    axis
max_pool | x | window stride? padding? dilation? |
    over the last len(window) axes; padding ((low, high), ...) of -inf; stride = window
avg_pool | x | window stride? padding? count_padding? |
    mean over windows; count_padding = True
sum_pool      | x       | window stride? padding?  | sum over windows
softmax       | x       | axis           | e**x / sum e**x
log_softmax   | x       | axis           | x - logsumexp(x)
cross_entropy | z t | axis reduction? |
    -sum t log_softmax(z) over axis; integer t are labels; reduction in "mean" (over what is
    left), "sum", "none"
standardize   | x       | axes eps?      | (x - mean) / sqrt(variance + eps); eps = 0
layer_norm | x scale? shift? | axes eps |
    standardize(x) * scale + shift; both of x's shape at axes
batch_norm | x scale? shift? mean? variance? | training eps axis? |
    over all axes but axis = 1; in training without mean and variance
group_norm    | x scale? shift?  | groups eps | x: N, C, ...; scale and shift: C
rms_norm      | x scale? | axes eps      | x / sqrt(mean x**2 + eps) * scale
attention | q k v mask? | scale? causal? |
    softmax(scale q k^T + mask) v over the last two axes; a boolean mask keeps where true
embedding     | table i |                | table[i]
dropout       | x mask  | rate           | x * mask / (1 - rate)
"""

_LINALG = """
det           | a       |                | determinant of the last two axes
slogdet       | a       |                | sign and log abs det | sign logabsdet
logdet        | a       |                | log det
inverse       | a       |                | matrix inverse
solve         | a b     |                | a^-1 b; b is a matrix (or a batch of them)
triangular_solve | a b | lower? unit? transpose? conjugate? left? |
    a^-1 b of the named triangle; transposed or conjugated; left = False: b a^-1
cholesky      | a       | upper?         | l with l l^H = a (or u with u^H u = a)
matrix_power  | a       | exponent       | an integer
expm          | a       |                | matrix exponential
pinv          | a       |                | pseudo-inverse
eigh          | a       |                | of (a + a^H)/2, ascending | values vectors
svd           | a       |                | thin: a = u diag(s) vh | u s vh
qr            | a       |                | reduced, as many rows as columns or more | q r
fft           | x       | axes? norm?     | norm in "backward" (default), "ortho", "forward"
ifft          | x       | axes? norm?     | inverse of fft
rfft          | x       | axes? norm?     | of real x; the last of axes is halved
irfft         | x       | axes? length norm?  | inverse of rfft; length of the last of axes
"""

_CONTROL = """
scan | *const *carry *xs | consts carries length reverse? |
    bodies[0]: (consts, carries, one slice of each xs) to (carries, ys) | carry* ys*
while | *const *carry | condition_consts body_consts |
    bodies[0]: (condition consts, carries) to a boolean; bodies[1]: (body consts, carries)
    to carries | carry*
cond | index *operand |  |
    bodies[index] of the operands; a boolean index takes bodies[1] when true | out*
call          | *x      |                | bodies[0] of the operands, written out | out*
custom_rule | *x | name residuals once? |
    bodies[0]: x to (out*, residual*); bodies[1]: (residual*, cotangent of out*) to
    cotangents of x; once: in a derivative the out* are what bodies[0] says, no rule any more
    | out*
scale_gradient | x      | scale          | x; its derivative times scale
opaque | *x | function? adjoint? |
    any other name: out = function(*x); the cotangents = adjoint(*x, *cotangents), both in
    NumPy | out*
"""

OPERATIONS: dict[str, Operation] = _table(
    "\n".join(
        part.strip()
        for part in (
            _LEAVES,
            _ELEMENTWISE,
            _SHAPES,
            _INDEXING,
            _REDUCTIONS,
            _CONTRACTIONS,
            _LAYERS,
            _LINALG,
            _CONTROL,
        )
    )
)
