"""Model-hub data sets as tables, through ``datasets``. Code of a data set is never run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from gar.data._rows import Row, Table
from gar.errors import UserError

CONVERTED = "refs/convert/parquet"


def open_split(
    hub: str, config: str | None, split: str, columns: Sequence[str]
) -> tuple[Table, dict[str, tuple[str, ...]]]:
    """The named columns of one split, and the class names of those that are ``ClassLabel`` features."""
    import datasets  # slow to import, and not needed for local files

    source = f"{hub}{f' ({config})' if config else ''} [{split}]"
    try:
        try:
            dataset = datasets.load_dataset(hub, config, split=split)
        except RuntimeError as error:
            if "scripts are no longer supported" not in str(error):
                raise
            # The hub keeps a converted copy of data sets that still hold a loading script.
            dataset = datasets.load_dataset(hub, config, split=split, revision=CONVERTED)
    except (OSError, ValueError, RuntimeError) as error:  # not there, no network, unknown config or split
        reason = f"cannot be loaded from the hub ({_reason(error)})"
        raise UserError(f"{source}: {reason}{_advice(error)}") from None
    present = [column for column in dict.fromkeys(columns) if column in dataset.column_names]

    def rows() -> Iterator[Row]:
        number = 0
        for batch in dataset.select_columns(present).iter(batch_size=1000):
            for values in zip(*(batch[column] for column in present), strict=True):
                number += 1
                yield number, dict(zip(present, values, strict=True))

    classes = {
        column: tuple(feature.names)
        for column, feature in dataset.features.items()
        if isinstance(feature, datasets.ClassLabel)
    }
    return Table(source, rows(), tuple(dataset.column_names), unit="row"), classes


def _reason(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0].rstrip(".")


def _advice(error: Exception) -> str:
    if isinstance(error, ConnectionError):
        return "; without network, put the files into a directory and name it with --data-dir"
    return ""
