"""A batch of samples of unlike lengths, in groups: each group padded to its own longest, modules applied to each.

::

    samples ──group──► groups ──apply──► groups of outputs ──regroup(UniGrouper())──► one batch, in the first order
                         └───────────────────┴─────────────ungroup──► samples

After asym (``DataCollection``, its groupers and its annotated modules). What a module gives for a sample does not
depend on the grouping, and neither do gradients; :class:`pipeal.data.grouping.AnnotatedModule` names the exception.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from pipeal.core.errors import ConfigError, DataError, ScheduleError, unknown_name
from pipeal.data.grouping.annotated import Annotated, AnnotatedModule, MaskHint
from pipeal.data.grouping.annotation import Annotation, length_names, parse, tensors_of
from pipeal.data.grouping.groupers import Grouper, Partition, checked, whole
from pipeal.data.grouping.groups import Groups
from pipeal.data.grouping.matching import Match
from pipeal.data.grouping.nesting import at, build, leaves, renamed
from pipeal.data.grouping.padders import padders_of
from pipeal.data.grouping.samples import Samples

__all__ = ["DataCollection", "TensorData"]


@dataclass(frozen=True, eq=False)
class TensorData:
    """A tensor, or nested tensors, of a sample or a group.

    Attributes:
        value: The tensor, or the dict, tuple or list of them.
    """

    value: Any

    def __getitem__(self, key: str | int) -> TensorData:
        return TensorData(self.value[key])


class DataCollection:
    """Samples with annotated dimensions, either single (``data_list``) or in groups (``data_groups``).

    >>> from pipeal.data.grouping import PredefinedGrouper
    >>> batch = DataCollection("(B, L_word)", [torch.tensor([7, 8, 9]), torch.tensor([1]), torch.tensor([4, 5, 6])])
    >>> batch.group(PredefinedGrouper([[1], [2, 0]]))
    >>> [group.value.tolist() for group in batch.data_groups]
    [[[1]], [[4, 5, 6], [7, 8, 9]]]

    Args:
        shape_annot: The dimensions, with the batch where it shall be: ``"(B, L_word)"``, or nested like the samples.
            See :mod:`pipeal.data.grouping.annotation`. What it does not name is left out.
        data_list: The samples, without a batch dimension. Give these, or groups.
        data_groups: Groups that are padded already, at the end of every length.
        length_info: For groups: for each name of a length, the lengths of the samples of every group.
        data_partition: For groups: which samples they hold; by default in order.
        padding: What to pad with: a :class:`Padder`, or a dict of them nested like the samples; zeros by default.

    Raises:
        ConfigError: A malformed annotation or padding, or not one of samples and groups.
        DataError: No samples; samples or groups that do not have the annotated form; lengths that are not whole, or
            more than a group holds.
    """

    def __init__(
        self,
        shape_annot: Annotation,
        data_list: Sequence[Any] | None = None,
        data_groups: Sequence[Any] | None = None,
        length_info: Mapping[str, Sequence[Sequence[int]]] | None = None,
        data_partition: Sequence[Sequence[int]] | None = None,
        padding: Any = None,
    ) -> None:
        layout = parse(shape_annot)
        self._padding = padding
        padders_of(layout, padding)  # a mistake in it should show here, not at the first group
        self._held: Samples | Groups
        if (data_list is None) == (data_groups is None):
            raise ConfigError("a collection is made of data_list or of data_groups; give one of the two")
        if data_list is not None:
            if length_info is not None or data_partition is not None:
                raise ConfigError("length_info and data_partition go with data_groups; leave them out of a data_list")
            self._held = Samples.checked(layout, [_value(sample) for sample in data_list])
        else:
            groups = [_value(group) for group in data_groups or []]
            self._held = Groups.checked(layout, groups, length_info or {}, data_partition)

    def __len__(self) -> int:
        """The number of samples."""
        return self._held.count

    def __repr__(self) -> str:
        form = f"{len(self._held.partition)} groups" if isinstance(self._held, Groups) else "not grouped"
        return f"DataCollection({len(self)} samples, {form})"

    @property
    def is_grouped(self) -> bool:
        """Whether there are groups, rather than single samples."""
        return isinstance(self._held, Groups)

    @property
    def data_list(self) -> list[TensorData]:
        """The samples, in order.

        Raises:
            ScheduleError: They are in groups.
        """
        if isinstance(self._held, Groups):
            raise ScheduleError("the samples are in groups; call ungroup() first, or read data_groups")
        return self._as_data()

    @property
    def data_groups(self) -> list[TensorData]:
        """The groups.

        Raises:
            ScheduleError: There are none.
        """
        self._groups()
        return self._as_data()

    @property
    def data_partition(self) -> Partition:
        """The indices of the samples in each group.

        Raises:
            ScheduleError: There are no groups.
        """
        return [list(part) for part in self._groups().partition]

    @property
    def length_info(self) -> dict[str, list[list[int]]]:
        """For each name of a length, the lengths of the samples in each group.

        Raises:
            ScheduleError: There are no groups.
        """
        groups = self._groups()
        return {name: [own[part].tolist() for part in groups.partition] for name, own in groups.lengths.items()}

    def group(
        self,
        grouper: Grouper,
        padding: Any = None,
        forget_order: bool = False,
        *,
        padded_to: Mapping[str, int] | None = None,
    ) -> None:
        """Puts the samples into groups, each padded to its longest.

        Args:
            grouper: Says which belong together.
            padding: As for the collection, which then must not have one.
            forget_order: Renumber the samples in the order of the groups.
            padded_to: For names of lengths, a size that every group shall have at least.

        Raises:
            ScheduleError: They are in groups already.
            ConfigError: No grouper, padding that was given twice, or a size that is no whole number.
            DataError: The grouper does not suit the data, or there is no such length.
        """
        if self.is_grouped:
            raise ScheduleError("the samples are in groups already; call regroup(), or ungroup() first")
        self._form(grouper, padding, forget_order, padded_to or {})

    def regroup(
        self,
        grouper: Grouper,
        padding: Any = None,
        forget_order: bool = False,
        *,
        padded_to: Mapping[str, int] | None = None,
    ) -> None:
        """Puts the samples into other groups; arguments and errors as in :meth:`group`, but there must be groups."""
        self._groups()
        self._form(grouper, padding, forget_order, padded_to or {})

    def ungroup(self) -> None:
        """Takes the groups apart, without their padding.

        Raises:
            ScheduleError: There are no groups.
        """
        groups = self._groups()
        self._held = Samples(groups.layout, groups.apart(), groups.lengths)

    def get_mask(self, i: int, mask_hint: MaskHint = "copy") -> Any:
        """The mask of a group: true where a position lies inside its sample along **all** its lengths.

        Args:
            i: Which group.
            mask_hint: ``"copy"`` for masks shaped and nested like the group; or names of lengths, for one of
                shape ``(B, L_first, L_second, …)``.

        Raises:
            ScheduleError: There are no groups.
            DataError: No such length.
        """
        return self._groups().mask(i, mask_hint or ())

    def apply(self, module: AnnotatedModule, input_key_conv: Any = None, output_key_conv: Any = None) -> DataCollection:
        """Calls a module on every group.

        Args:
            module: Its annotation of the input may name a part of the data; it gets all of it.
            input_key_conv: ``{key: (key of the module, the same for what is below, or None)}``.
            output_key_conv: The same, from the keys of what it gives.

        Returns:
            The outputs, in the same groups.

        Raises:
            ScheduleError: There are no groups.
            ConfigError: ``module`` is not annotated, or gives lengths that it does not take.
            DataError: Its annotations do not fit the data, or what it gives does not have the form it says.
        """
        groups = self._groups()
        if not isinstance(module, AnnotatedModule):
            raise ConfigError(
                f"{type(module).__name__} has no annotations; wrap it in Annotated(module, input, output)"
            )
        who = type(module.module if isinstance(module, Annotated) else module).__name__
        match = Match.of(
            parse(module.get_input_annot(), module=True), renamed(groups.layout, input_key_conv, "input_key_conv"), who
        )
        given = match.layout(parse(module.get_output_annot(), module=True), who)
        hint = match.mask_hint(module.get_mask_hint(), who)
        layout = renamed(given, output_key_conv, "output_key_conv")
        outputs = []
        for number, group in enumerate(groups.tensors):
            arguments = [renamed(build(groups.layout, iter(group)), input_key_conv, "input_key_conv")]
            if hint is not None:
                mask = groups.mask(number, hint)
                arguments.append(renamed(mask, input_key_conv, "input_key_conv") if hint == "copy" else mask)
            found = tensors_of(given, module(*arguments), f"the output of {who}")
            outputs.append(found)
            groups.check(found, outputs[0], given, number, f"the output of {who}")
        kept = {name: groups.lengths[name] for name in length_names(given)}
        return self._like(Groups(layout, outputs, groups.partition, kept), None)

    def to_device(self, device: torch.device | str) -> DataCollection:
        """The same collection on a device."""
        moved = [[tensor.to(device) for tensor in tensors] for tensors in self._held.tensors]
        return self._like(replace(self._held, tensors=moved), self._padding)

    def __getitem__(self, key: str | int) -> DataCollection:
        """A part of nested data, in the same groups.

        Raises:
            DataError: There is no such part.
        """
        held = self._held
        layout = at(held.layout, (key,), "the collection")
        padding = self._padding.get(key) if isinstance(self._padding, dict) else self._padding
        chosen = [place for place, (keys, _) in enumerate(leaves(held.layout)) if keys[0] == key]
        tensors = [[tensors[place] for place in chosen] for tensors in held.tensors]
        lengths = {name: held.lengths[name] for name in length_names(layout)}
        return self._like(replace(held, layout=layout, tensors=tensors, lengths=lengths), padding)

    def _groups(self) -> Groups:
        if not isinstance(self._held, Groups):
            raise ScheduleError("the samples are not in groups; call group() first")
        return self._held

    def _as_data(self) -> list[TensorData]:
        return [TensorData(build(self._held.layout, iter(tensors))) for tensors in self._held.tensors]

    def _form(self, grouper: Grouper, padding: Any, forget_order: bool, padded_to: Mapping[str, int]) -> None:
        held = self._held
        if not isinstance(grouper, Grouper):
            raise ConfigError(f"the grouper is {grouper!r}; wanted a Grouper, such as UniGrouper()")
        if padding is not None and self._padding is not None:
            raise ConfigError("the collection has a padding of its own; leave out that of group()")
        padders = padders_of(held.layout, self._padding if padding is None else padding)
        for name in padded_to:
            if name not in held.lengths:
                raise DataError(unknown_name("length", name, held.lengths))
        whole("padded_to", list(padded_to.values()), 0)
        partition = checked(grouper.partition(held.lengths, held.count), held.count)
        formed = held.formed(partition, padders, padded_to)
        self._held = formed.renumbered() if forget_order else formed

    def _like(self, held: Samples | Groups, padding: Any) -> DataCollection:
        """A collection of what is known to be right."""
        made = DataCollection.__new__(DataCollection)
        made._held, made._padding = held, padding
        return made


def _value(data: Any) -> Any:
    return data.value if isinstance(data, TensorData) else data
