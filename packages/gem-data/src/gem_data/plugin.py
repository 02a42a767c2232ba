"""Declarations of gem-data. Imports nothing heavy."""

from collections.abc import Sequence

from gem_core.spec import CliCommand, DataSource, hookimpl


@hookimpl
def gem_data_sources() -> Sequence[DataSource]:
    return [
        DataSource(
            name="ml-100k",
            summary="MovieLens-100K: rating >= 4, histories of strictly earlier events, last 20 % of each user as test",
            load="gem_data.sources.ml_100k:load",
            options="gem_data.options:Ml100kOptions",
        ),
        DataSource(
            name="criteo-orc",
            summary="Criteo-style clicks in ORC files: 13 numbers and 26 categories, every column a list",
            load="gem_data.sources.criteo_orc:load",
            options="gem_data.options:CriteoOrcOptions",
        ),
        DataSource(
            name="files",
            summary="prepared folders, or your own Parquet, ORC and Arrow IPC files with a schema.toml: streamed, shuffled, balanced, resumable",
            load="gem_data.sources.files:load",
            options="gem_data.options:FilesOptions",
        ),
        DataSource(
            name="synthetic",
            summary="generated impressions with histories whose best possible AUC and NE are known",
            load="gem_data.sources.synthetic:load",
            options="gem_data.options:SyntheticOptions",
        ),
        DataSource(
            name="generated",
            summary="impressions of any size computed as they are read; the best possible AUC and NE are known, with histories and without",
            load="gem_data.sources.generated:load",
            options="gem_data.options:GeneratedOptions",
        ),
        DataSource(
            name="workload",
            summary="rows of given shapes for measuring speed: sequences by distribution of length, tables of any size, labels that can be learnt",
            load="gem_data.sources.workload:load",
            options="gem_data.options:WorkloadOptions",
        ),
    ]


@hookimpl
def gem_cli_commands() -> Sequence[CliCommand]:
    return [CliCommand(name="data", load="gem_data.cli:app", summary="fetch data sets and list data sources")]
