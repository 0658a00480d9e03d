"""What a format of frozen linear weights is: one object that everything else asks.

It makes weights of dense ones, multiplies with them, knows what they take, and how files hold them. A new format is a
file like `bitsandbytes.py` and a line in `registry.py`; no other file names it. Formats are values: of two that are
equal, weights are stored alike.

Legend: T tokens, N output features, K input features, G groups of a row.
"""

import dataclasses
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, ClassVar, Generic, Protocol, Self, TypeVar, cast

import torch
from torch import Tensor

from kernels.linear._quantized_cpu import quantized_c_product, shares_codes, turned_weight
from kernels.linear.c_product import CProduct
from kernels.linear.dense import linear
from kernels.linear.lora import LoraWeights, Slots, lora_add
from kernels.linear.quantization import (
    IntegerWeight,
    integer_levels,
    integer_weight,
    quantize_integers,
    stack_integers,
)
from kernels.linear.quantized import (
    TiledWeight,
    expand,
    prepare_quantized_weight,
    quantized_linear,
    quantized_linear_in_fp32,
    stored_codes,
)
from kernels.linear.quantized_embedding import quantized_embedding
from kernels.linear.quantized_swiglu import quantized_swiglu
from kernels.linear.rounded import Rounding, rounded_linear, rounded_linear_c_product
from kernels.swiglu import swiglu_of_halves
from model.files.artifact import READERS
from model.files.safe_io import CheckpointError


class QuantizedMatrix(Protocol):
    """A weight [N, K], a dataclass of tensors."""

    @property
    def shape(self) -> tuple[int, int]: ...

    def dequantize(self, dtype: torch.dtype = torch.float32, rows: slice = slice(None)) -> Tensor:
        """The matrix, or `rows` of it."""
        ...


W = TypeVar("W", bound=Any)
FormatOfLayer = Callable[[str], "WeightFormat[Any] | None"]
"""Of a layer by its name, such as `model.layers.0.mlp.up_proj`; None where it is dense."""


ROUNDED_BLOCKS, WIDE_BLOCKS = Rounding(torch.int8, group=32), Rounding(torch.int8, group=64)
"""Of activations beside weights of few bits: fine enough to cost little, and the first in the size of ggml's blocks."""


class ServingForm(ABC, Generic[W]):
    """How weights are multiplied: what serving asks of quantized weights, and of dense ones too."""

    @property
    def rounds_activations(self) -> bool:
        """Whether products round what they multiply with weights."""
        return False

    def stack(self, weights: Sequence[W]) -> W | None:
        """Matrices of the same K below one another as one, to the bit; None where they do not go together."""
        return None

    @abstractmethod
    def prepare(self, weight: W) -> Any:
        """The weight as `product` takes it, on its device: for many products."""

    @abstractmethod
    def product(
        self, x: Tensor, prepared: Any, bias: Tensor | None = None, lora: LoraWeights | None = None, slots: Slots = None
    ) -> Tensor:
        """`x Wᵀ + b`, [T, N] of x [T, K], plus what adapters add; `lora` and `slots` as in `lora_add`."""

    def swiglu(
        self, x: Tensor, prepared: Any, bias: Tensor | None = None, lora: LoraWeights | None = None, slots: Slots = None
    ) -> Tensor:
        """`silu(gate) * up` of the two halves of `product`."""
        return swiglu_of_halves(self.product(x, prepared, bias, lora, slots))

    def c_product(self, prepared: Any, dtype: torch.dtype) -> CProduct | None:
        """What `product` calls for few rows in this dtype on the CPU, without a bias; None where that is not in C."""
        return None

    def expanded(self, prepared: Any, dtype: torch.dtype) -> Tensor | None:
        """The matrix [N, K] that `product` multiplies many rows with on a GPU; None where it does something else."""
        return None


class WeightFormat(ServingForm[W]):
    """One format, with its options; as written here it multiplies with the expanded weight."""

    name: ClassVar[str]
    """By which recipes ask for it."""
    holds_embeddings: ClassVar[bool] = True
    """Whether files can hold embeddings in it."""

    @property
    def title(self) -> str:
        """How people read it."""
        return self.name.upper()

    @classmethod
    def with_options(cls, *, double: bool = True, **options: Any) -> Self:
        """As recipes ask for it, by the names of its fields; ValueError for one that it does not have.

        `double`: quantize the scales too, where the format can.
        """
        known = {field.name for field in dataclasses.fields(cls)}  # type: ignore[arg-type]
        if unknown := sorted(options.keys() - known):
            raise ValueError(f"{cls.name} has no option {unknown[0]}.")
        return cls(**options)

    @property
    def readers(self) -> tuple[str, ...]:
        """Other programs that open folders with such layers."""
        return READERS

    def of(self, weight: W) -> Self:
        """The format with the options of this weight."""
        return self

    def check_row(self, num_inputs: int) -> None:
        """Raise ValueError where the format cannot hold rows of so many weights."""

    @abstractmethod
    def quantize(self, dense: Tensor) -> W:
        """Of a matrix [N, K] of floats."""

    @abstractmethod
    def num_bytes(self, shape: Sequence[int]) -> int:
        """Of a weight's codes and scales, in memory."""

    def prepared_bytes(self, shape: Sequence[int], *, on_gpu: bool) -> int:
        """What its form for products holds besides, once it is prepared."""
        return 0

    def tensors(self, weight: W) -> dict[str, Tensor]:
        """What the weight is made of."""
        parts = {field.name: getattr(weight, field.name) for field in dataclasses.fields(weight)}
        return {name: part for name, part in parts.items() if isinstance(part, Tensor)}

    def moved(self, weight: W, device: torch.device | str) -> W:
        """The weight on another device."""
        return dataclasses.replace(weight, **{name: part.to(device) for name, part in self.tensors(weight).items()})

    def check_narrow(self, columns: slice, num_columns: int) -> None:
        """Raise ValueError where the format cannot hold these of so many columns of a matrix alone."""
        raise ValueError(f"{self.title} weights are served whole")

    def narrow(self, weight: W, rows: slice, columns: slice) -> W:
        """A part of the matrix that `check_narrow` allows, of the same numbers."""
        raise NotImplementedError

    def of_parts(self) -> Self:
        """The format that parts are in."""
        return self

    # Products

    def rounded(self, num_inputs: int) -> Self:
        """The same, but products round rows of so many activations to 8 bits. ValueError where there are none such."""
        raise ValueError(f"{self.title} has no products with activations in 8 bits.")

    def prepare(self, weight: W) -> Any:
        return weight

    def release(self, weight: W, prepared: Any) -> W:
        """The weight without what the prepared one holds too."""
        return weight

    def restore(self, weight: W, prepared: Any) -> W:
        """The whole weight again, to the bit."""
        return weight

    def product(
        self, x: Tensor, prepared: Any, bias: Tensor | None = None, lora: LoraWeights | None = None, slots: Slots = None
    ) -> Tensor:
        y = linear(x, prepared.dequantize(x.dtype), bias)
        return y if lora is None else lora_add(y, x, lora, slots)

    def expanded(self, prepared: Any, dtype: torch.dtype) -> Tensor | None:
        return prepared.dequantize(dtype)

    def in_fp32(self, x: Tensor, prepared: Any) -> Tensor:
        """`product`, in fp32 before it is rounded to the dtype of x, where that can be had: for logits."""
        return self.product(x.to(torch.promote_types(x.dtype, torch.float32)), prepared)

    def times(self, x: Tensor, prepared: Any) -> Tensor:
        """`x Wᵀ` of x as it is, whatever `product` does to activations."""
        return self.product(x, prepared)

    def rows(self, tokens: Tensor, prepared: Any, dtype: torch.dtype) -> Tensor:
        """Of a prepared weight [V, D] those of `tokens` [T] int64, [T, D]."""
        return prepared.dequantize(dtype, tokens)

    # Files

    @classmethod
    def of_layers(cls, entry: dict[str, Any]) -> "FormatOfLayer | None":
        """The format of each layer by `quantization_config` of a config.json; None if that is for others to read."""
        found = cls.from_config(entry)
        return None if found is None else lambda name: found

    @classmethod
    def entry_of_layers(
        cls, formats: Mapping[str, "WeightFormat[Any]"], dtype: torch.dtype, dense: Collection[str]
    ) -> dict[str, Any]:
        """`quantization_config` of layers, by name, in formats that this and its like hold; see `config_entry`.

        CheckpointError where one folder cannot hold them all.
        """
        first, *others = dict.fromkeys(formats.values())
        if others:
            raise CheckpointError(
                f"Files in {first.title} hold all quantized layers in one format with one set of options, not "
                f"{others[0].title} beside it."
            )
        return first.config_entry(dtype, dense)

    @classmethod
    @abstractmethod
    def from_config(cls, entry: dict[str, Any]) -> Self | None:
        """The format that `quantization_config` of a config.json describes; None if it is another."""

    @classmethod
    def describe(cls, entry: dict[str, Any]) -> str | None:
        """What the entry says, for a reader, if the layout is that of this format's files but the format is not."""
        return None

    @abstractmethod
    def config_entry(self, dtype: torch.dtype, dense: Collection[str]) -> dict[str, Any]:
        """`quantization_config` of a model in `dtype`; `dense` are the linear layers that are not quantized."""

    @abstractmethod
    def stored_names(self, name: str) -> list[str]:
        """All tensors that files may hold for the weight `name`; the last one tells that it is in this format."""

    @abstractmethod
    def to_files(self, name: str, weight: W, dtype: torch.dtype) -> dict[str, Tensor]:
        """The tensors of a weight, on the CPU; `dtype` is that to which other tools will expand it."""

    @abstractmethod
    def from_files(self, name: str, shape: torch.Size, read: Callable[[str], Tensor]) -> W:
        """Reads a weight [N, K] by its tensors; CheckpointError naming the one that is wrong."""


class KernelFormat(WeightFormat[W]):
    """A format that `kernels.linear.quantized` multiplies with. Where codes are repacked only those are kept."""

    rounding: Rounding | None = None
    """How activations are rounded before they are multiplied; None: not at all."""

    @property
    def rounds_activations(self) -> bool:
        return self.rounding is not None

    @property
    def usual_rounding(self) -> Rounding:
        """How products round where recipes or servers ask for rounded activations."""
        return ROUNDED_BLOCKS

    def check_rounded_whole(self, columns: slice, num_columns: int) -> None:
        """Raise ValueError where fewer activations than a row would be rounded with a scale of their own."""
        is_whole = columns.indices(num_columns)[:2] == (0, num_columns)
        if self.rounding is not None and self.rounding.group is None and not is_whole:
            raise ValueError(f"{self.title} here rounds whole rows of activations, of which a rank has a part")

    def prepare(self, weight: W) -> Any:
        return prepare_quantized_weight(weight)

    def release(self, weight: W, prepared: Any) -> W:
        if shares_codes(prepared):
            return weight
        if (held := turned_weight(prepared)) is not None:
            return cast("W", held.rest)
        return dataclasses.replace(weight, codes=weight.codes.new_empty(0, *weight.codes.shape[1:]))

    def restore(self, weight: W, prepared: Any) -> W:
        if weight.codes.numel():
            return weight
        if (held := turned_weight(prepared)) is not None:
            return cast("W", held.stored())
        return dataclasses.replace(weight, codes=stored_codes(prepared))

    def product(
        self, x: Tensor, prepared: Any, bias: Tensor | None = None, lora: LoraWeights | None = None, slots: Slots = None
    ) -> Tensor:
        if self.rounding is None:
            return quantized_linear(x, prepared, bias, lora, slots)
        y = rounded_linear(x, prepared, bias, self.rounding)
        return y if lora is None else lora_add(y, x, lora, slots)

    def c_product(self, prepared: Any, dtype: torch.dtype) -> CProduct | None:
        if self.rounding is None:
            return quantized_c_product(prepared, dtype)
        return rounded_linear_c_product(prepared, self.rounding, dtype)

    def expanded(self, prepared: Any, dtype: torch.dtype) -> Tensor | None:
        return expand(prepared, dtype) if self.rounding is None and isinstance(prepared, TiledWeight) else None

    def in_fp32(self, x: Tensor, prepared: Any) -> Tensor:
        if self.rounding is None:
            return quantized_linear_in_fp32(x, prepared)
        return super().in_fp32(x, prepared)

    def times(self, x: Tensor, prepared: Any) -> Tensor:
        return quantized_linear(x, prepared)

    def rows(self, tokens: Tensor, prepared: Any, dtype: torch.dtype) -> Tensor:
        return quantized_embedding(tokens, prepared, dtype)

    def swiglu(
        self, x: Tensor, prepared: Any, bias: Tensor | None = None, lora: LoraWeights | None = None, slots: Slots = None
    ) -> Tensor:
        if self.rounding is None:
            return quantized_swiglu(x, prepared, bias, lora, slots)
        return super().swiglu(x, prepared, bias, lora, slots)


class GridFormat(WeightFormat[W]):
    """Levels on a grid: w = (level − zero) · scale; what can be trained through rounding.

    Scales [N, G] are those of groups of neighbours in a row, or [1, 1] the matrix's.
    """

    @property
    @abstractmethod
    def num_levels(self) -> int:
        """Levels are 0 … num_levels − 1; the zero is num_levels // 2 where no other is stored."""

    @abstractmethod
    def num_scales(self, shape: Sequence[int]) -> int:
        """Of a weight."""

    @abstractmethod
    def pack(self, levels: Tensor, scales: Tensor, zeros: Tensor | None = None) -> W:
        """The weight of levels u8 [N, K], scales fp32 [N, G] and, unless symmetric, zeros u8 [N, G].

        Files keep scales in the model's dtype where they are numbers of it, else in fp32: so choose the levels for
        scales that `nearest_scales` gave.
        """

    @abstractmethod
    def unpack(self, weight: W) -> tuple[Tensor, Tensor, Tensor | None]:
        """Levels, scales and zeros as `pack` takes them."""

    def nearest_scales(self, scales: Tensor, dtype: torch.dtype) -> Tensor:
        """The nearest that files hold in `dtype`, fp32."""
        return scales.to(dtype).float()


@dataclasses.dataclass(frozen=True)
class IntegerFormat(KernelFormat[IntegerWeight], GridFormat[IntegerWeight]):
    """Levels of some bits on a grid, multiplied by kernels.

    Files differ in how they hold these; methods that choose levels and scales need no more than `pack`.
    """

    group: int | None = None
    """Weights that share a scale; None: the whole row."""
    symmetric: bool = True
    """Whether the zero is 2^(bits − 1) everywhere."""
    rounding: Rounding | None = dataclasses.field(default=None, kw_only=True)
    others_need_zeros: ClassVar[bool] = False
    """Whether programs that read such files look for zeros even where all are alike."""

    @property
    @abstractmethod
    def bits(self) -> int:
        """Of a level: 4, 6 or 8."""

    @property
    def usual_rounding(self) -> Rounding:
        """Of weights with groups of 64, 128 and so on 64 neighbours: products of blocks of 32 take a tenth longer."""
        return ROUNDED_BLOCKS if self.group is None or self.group % 64 else WIDE_BLOCKS

    def rounded(self, num_inputs: int) -> Self:
        format = dataclasses.replace(self, rounding=self.rounding or self.usual_rounding)
        format.num_groups(num_inputs)
        return format

    def __post_init__(self) -> None:
        if self.bits == 8 and not self.symmetric:
            raise ValueError(f"{self.title} is symmetric: it takes no zeros.")
        if self.group is not None and self.group < 1:
            raise ValueError(f"{self.title} cannot have groups of {self.group}; none are the whole row.")

    def check_row(self, num_inputs: int) -> None:
        self.num_groups(num_inputs)

    def num_groups(self, num_inputs: int) -> int:
        """Of a row of so many weights; ValueError where the groups do not divide it."""
        group = self.group or num_inputs
        if num_inputs % group:
            raise ValueError(f"{self.title}: groups of {group} do not divide rows of {num_inputs} weights.")
        if self.rounding and num_inputs % (self.rounding.group or 1):
            raise ValueError(f"{self.title}: groups of {self.rounding.group} do not divide {num_inputs} activations.")
        return num_inputs // group

    def dividing_group(self, *lengths: int) -> int | None:
        """The largest groups, not above its own, that divide rows of all these lengths; None for whole rows."""
        whole = math.gcd(*lengths)
        return self.group and max(size for size in range(1, self.group + 1) if whole % size == 0)

    def groups_of(self, name: str, num_inputs: int) -> int:
        """`num_groups` of a stored weight; CheckpointError names it."""
        try:
            return self.num_groups(num_inputs)
        except ValueError as reason:
            raise CheckpointError(f"{name}: {reason}") from None

    def words(self) -> str:
        """Bits, groups and zeros in words, like "4 bits in groups of 32, symmetric"."""
        groups = "a row" if self.group is None else f"groups of {self.group}"
        return f"{self.bits} bits in {groups}, {'symmetric' if self.symmetric else 'asymmetric'}"

    @property
    def num_levels(self) -> int:
        return 1 << self.bits

    def num_scales(self, shape: Sequence[int]) -> int:
        return shape[0] * self.num_groups(shape[1])

    def pack(self, levels: Tensor, scales: Tensor, zeros: Tensor | None = None) -> IntegerWeight:
        return integer_weight(levels, scales, zeros, bits=self.bits, group=self.group or levels.shape[1])

    def unpack(self, weight: IntegerWeight) -> tuple[Tensor, Tensor, Tensor | None]:
        return integer_levels(weight)

    def convert(self, weight: IntegerWeight, source: "IntegerFormat") -> IntegerWeight:
        """The same numbers, to the bit, of a weight in another format; ValueError where this one cannot hold them."""
        if (source.bits, source.group) != (self.bits, self.group) or (self.symmetric and not source.symmetric):
            raise ValueError(
                f"bits, groups and zeros must agree, but it holds {self.words()} and not {source.words()}."
            )
        levels, scales, zeros = source.unpack(weight)
        if zeros is None and not self.symmetric:
            zeros = torch.full_like(scales, 1 << self.bits - 1, dtype=torch.uint8)
        return self.pack(levels, scales, zeros)

    def check_narrow(self, columns: slice, num_columns: int) -> None:
        self.check_rounded_whole(columns, num_columns)
        first, stop, _ = columns.indices(num_columns)
        if self.group and (first % self.group or (stop % self.group and stop < num_columns)):
            raise ValueError(
                f"groups of {self.group} weights do not divide the {stop - first} that a rank takes of a row; fewer "
                f"ranks take more, and weights that were quantized with weights.group: "
                f"{math.gcd(self.group, first, stop)} can be split so"
            )

    def narrow(self, weight: IntegerWeight, rows: slice, columns: slice) -> IntegerWeight:
        first, stop, _ = columns.indices(weight.shape[1])
        group = self.group or weight.shape[1]
        groups = slice(first // group, -(-stop // group)) if self.group else slice(None)
        levels, scales, zeros = self.unpack(weight)
        held = None if zeros is None else zeros[rows, groups].clone()
        return self.pack(levels[rows, columns], scales[rows, groups].clone(), held)

    def quantize(self, dense: Tensor) -> IntegerWeight:
        self.num_groups(dense.shape[1])
        return quantize_integers(dense, bits=self.bits, group=self.group, symmetric=self.symmetric)

    def num_bytes(self, shape: Sequence[int]) -> int:
        rows, columns = shape
        return rows * math.ceil(columns * self.bits / 8) + self._scale_bytes(shape)

    def _scale_bytes(self, shape: Sequence[int]) -> int:
        rows, columns = shape
        return (4 if self.symmetric else 5) * rows * math.ceil(columns / (self.group or columns))

    def prepared_bytes(self, shape: Sequence[int], *, on_gpu: bool) -> int:
        """On a GPU scales and zeros, in another order."""
        return self._scale_bytes(shape) if on_gpu else 0

    def stack(self, weights: Sequence[IntegerWeight]) -> IntegerWeight | None:
        return stack_integers(weights)
