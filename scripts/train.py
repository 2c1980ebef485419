"""Start any training run: `train.py {fit,validate,test} -c configs/….yaml [-c overlay.yaml] [--model.lr=…]`.

Overlays: `configs/trainer/` (where it runs), `configs/logger/` (where it logs). Later configs and flags win.
"""

from __future__ import annotations

import os
import re
import sys
import zipfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import lightning as L
from jsonargparse import ActionConfigFile
from lightning.pytorch.cli import ArgsType, LightningArgumentParser, LightningCLI, SaveConfigCallback
from lightning.pytorch.utilities.exceptions import MisconfigurationException

MISTAKES = (ValueError, TypeError, OSError, MisconfigurationException)
DEBUG = "JSONARGPARSE_DEBUG"


class Parser(LightningArgumentParser):
    """Ends on the cause: the usage of every option is pages long and hides it."""

    def error(self, message: str, ex: BaseException | None = None) -> None:  # type: ignore[override]
        """Print what is wrong and how to see the options; exit code 2."""
        if DEBUG in os.environ and ex is not None:
            raise ex
        sys.stderr.write(
            f"train.py: error: {message}\n\n"
            f"Options: python scripts/train.py fit --help; the traceback: {DEBUG}=1\n"
        )
        raise SystemExit(2)


class SaveResolvedConfig(SaveConfigCallback):
    """The resolved config lies at the top of the run's directory, and in every logger."""

    def save_config(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Called on rank 0. `config.yaml` is that of the training; a later `test` leaves it alone."""
        directory = Path(trainer.default_root_dir)
        directory.mkdir(parents=True, exist_ok=True)
        name = "config.yaml" if stage == "fit" else f"config.{stage}.yaml"
        (directory / name).write_text(self.parser.dump(self.config, skip_none=False, skip_check=True))
        for logger in trainer.loggers:
            logger.log_hyperparams({"config": self.config.as_dict()})


class Cli(LightningCLI):
    """LightningCLI with the project's parser; a user's mistake ends in a message instead of a traceback."""

    def init_parser(self, **kwargs: object) -> LightningArgumentParser:
        """Our parser class."""
        parser = Parser(**kwargs)  # type: ignore[arg-type]
        parser.add_argument("-c", "--config", action=ActionConfigFile, help="A YAML config; later ones win.")
        return parser

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """A logger writes into the run's directory."""
        parser.link_arguments(
            "trainer.default_root_dir",
            "trainer.logger.init_args.save_dir",
            compute_fn=lambda path: path or ".",
        )

    def parse_arguments(self, parser: LightningArgumentParser, args: ArgsType) -> None:
        """Lightning opens a checkpoint right after this; torch's own error would not name the file."""
        super().parse_arguments(parser, args)
        subcommand = self.config.get("subcommand")
        path = self.config[subcommand].get("ckpt_path") if subcommand else None
        if path and Path(path).is_file() and not zipfile.is_zipfile(path):
            self.parser.error(
                f"--ckpt_path {path} ({Path(path).stat().st_size:,} bytes) is no checkpoint: it was cut "
                "short, or something else wrote it; resume from an older one of the run's checkpoints"
            )

    def instantiate_classes(self) -> None:
        """Constructors refuse what cannot work: a missing path, an impossible combination."""
        try:
            super().instantiate_classes()
        except MISTAKES as error:
            self.refuse(error)

    def before_predict(self) -> None:
        """Say where predictions come from."""
        if type(self.model).predict_step is L.LightningModule.predict_step:
            self.parser.error(
                f"predict: {type(self.model).__name__} has no predict_step. Embeddings of a corpus: "
                "scripts/export.py, then scripts/build_index.py; results of the cascade: scripts/evaluate.py"
            )

    def _run_subcommand(self, subcommand: str) -> None:
        """What DataModules and modules refuse before the first batch is a mistake of the config as well."""
        try:
            super()._run_subcommand(subcommand)
        except MISTAKES as error:
            trainer = self.trainer
            loops = [
                trainer.fit_loop.epoch_loop,
                trainer.validate_loop,
                trainer.test_loop,
                trainer.predict_loop,
            ]
            if any(loop.batch_progress.current.ready for loop in loops):
                raise
            self.refuse(error)

    def refuse(self, error: BaseException) -> None:
        """End with the message, and with the keys of the paths that it is about."""
        # jsonargparse wraps what a constructor raises in a page about the types that it tried.
        while str(error).startswith("Does not validate against any") and error.__cause__ is not None:
            error = error.__cause__
        if not isinstance(error, MISTAKES):
            raise error
        message = str(error).strip()
        config = self.config.get(str(self.subcommand), self.config)
        paths = {
            key.replace(".init_args", ""): value
            for key, value in config.items(branches=False)
            if isinstance(value, str) and "/" in value
        }
        keys = [
            f"--{key}={path}"
            for key, path in paths.items()
            if re.search(rf"(?<![\w/.-]){re.escape(path)}(?![\w/.-])", message)
        ]
        self.parser.error(f"{message}\nSet by: {' '.join(keys)}" if keys else message, error)


def main(args: ArgsType = None, *, run: bool = True) -> Cli:
    """Build from the config, run the subcommand, save.

    Args:
        args: the command line, default `sys.argv`.
        run: False only builds; `args` then hold no subcommand.
    """
    return Cli(
        L.LightningModule,
        L.LightningDataModule,
        subclass_mode_model=True,
        subclass_mode_data=True,
        save_config_callback=SaveResolvedConfig,
        save_config_kwargs={"save_to_log_dir": False, "overwrite": True},
        seed_everything_default=0,
        trainer_defaults={"use_distributed_sampler": False},
        args=args,
        run=run,
    )


if __name__ == "__main__":
    main()
