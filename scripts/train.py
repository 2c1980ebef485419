"""Start any training run: `train.py {fit,validate,test} -c configs/….yaml [-c overlay.yaml] [--model.lr=…]`.

Overlays: `configs/trainer/` (where it runs), `configs/logger/` (where it logs). Later configs and flags win.
"""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import lightning as L
from jsonargparse import ActionConfigFile, Namespace
from lightning.pytorch.cli import ArgsType, LightningArgumentParser, LightningCLI, SaveConfigCallback
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from fovea.replace import replace_text
from lightning_modules import checkpoints
from lightning_modules.checkpoints import RECOVERY
from lightning_modules.recovery import Recovery

# What a shell reports of a process that a signal ended: 128 and the signal's number.
STOPPED, INTERRUPTED = 143, 130
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
        stage = str(getattr(stage, "value", stage))  # Lightning's enum would print itself with its class
        name = "config.yaml" if stage == "fit" else f"config.{stage}.yaml"
        config, start = self.config, ""
        if stage == "fit" and config.get("ckpt_path"):
            # The config of a run is how to train it; a checkpoint that it went on from may be gone by then.
            start = f"# resumed from {config.ckpt_path}\n"
            config = config.clone()
            config.ckpt_path = None
        text = start + self.parser.dump(config, skip_none=False, skip_check=True)
        replace_text(Path(trainer.default_root_dir) / name, text)
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
        """A logger writes into the run's directory; every fit can be gone on with."""
        parser.add_lightning_class_args(Recovery, "recovery")
        parser.link_arguments(
            "trainer.default_root_dir",
            "trainer.logger.init_args.save_dir",
            compute_fn=lambda path: path or ".",
        )

    def parse_arguments(self, parser: LightningArgumentParser, args: ArgsType) -> None:
        """Keep the command line: `_parse_ckpt_path` asks what was said on it and in its configs."""
        super().parse_arguments(parser, args)
        self._args = args
        self._checkpoint: dict[str, Any] | None = None

    def _said(self, subcommand: str) -> dict[str, Any]:
        """Arguments of the model that are no defaults of its class."""
        config = self._args
        if not isinstance(config, dict | Namespace):
            line = list(sys.argv[1:] if config is None else config)
            # A link needs its source, which is a default as a rule.
            config = self.parser.parse_args([*line, "--trainer.default_root_dir=."], defaults=False)
        arguments = (config[subcommand].get("model") or {}).get("init_args") or {}
        return dict(arguments.items() if isinstance(arguments, dict) else vars(arguments))

    def _parse_ckpt_path(self) -> None:
        """What was said stands; the checkpoint's hyperparameters take the place of defaults.

        (Lightning would let the checkpoint win over flags.) A fit that is resumed goes on with the run's own
        settings, so there another value is refused: see `checkpoints.FREE`.
        """
        subcommand = self.config.get("subcommand")
        path = self.config[subcommand].get("ckpt_path") if subcommand else None
        if not path or not Path(path).is_file():
            return
        try:
            self._checkpoint = checkpoints.read(path)
        except ValueError as error:
            self.parser.error(f"--ckpt_path {error}", error)
        assert self._checkpoint is not None
        hparams = dict(self._checkpoint.get("hyper_parameters", {}))
        model, module = self.config[subcommand].model, hparams.get("_class_path")
        if module is not None and module != model.class_path:
            self.parser.error(f"--ckpt_path {path} is of {module}; the config's model is {model.class_path}")
        said = self._said(subcommand)
        differing = checkpoints.differences(self._checkpoint, said)
        if fixed := [key for key in differing if subcommand == "fit" and key not in checkpoints.FREE]:
            values = ", ".join(f"model.{k}={differing[k][0]} (there {differing[k][1]})" for k in fixed)
            self.parser.error(
                f"--ckpt_path {path}: a resumed run keeps its own settings, and these differ: {values}. Give "
                "those of the run (-c RUN/config.yaml), or start a new run from its weights: "
                "scripts/export.py, then model.encoder"
            )
        for key, default in vars(model.init_args).items():
            if key in hparams and key not in said:
                value = hparams[key]
                model.init_args[key] = tuple(value) if isinstance(default, tuple) else value

    def _set_seed(self) -> None:
        """A seed that no generator takes is a mistake like any other."""
        try:
            super()._set_seed()
        except ValueError as error:
            self.parser.error(f"seed_everything: {error}", error)

    def instantiate_classes(self) -> None:
        """Constructors refuse what cannot work: a missing path, an impossible combination."""
        try:
            super().instantiate_classes()
            if self._checkpoint is not None:
                path = self.config[self.subcommand].ckpt_path
                evaluation = self.subcommand != "fit"
                checkpoints.check_weights(self._checkpoint, self.model, path, resizable=evaluation)
                self._checkpoint = None
            on_cpu = self.trainer.strategy.root_device.type == "cpu"
            if on_cpu and self.trainer.precision == "16-true":
                raise ValueError(
                    "trainer.precision=16-true: no float16 weights on the CPU; use 32-true or bf16-mixed"
                )
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
        except SystemExit as end:  # Lightning leaves a stopped run with the status of a finished one
            status = self._stopped(end)
            if status is None:
                raise
            if self.trainer.is_global_zero:
                sys.stderr.write(f"train.py: {self._how_to_go_on(status)}\n")
            raise SystemExit(status) from None
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

    def _stopped(self, end: SystemExit) -> int | None:
        """Exit status of a run that a signal stopped; None: it ended for another reason."""
        if self.trainer.received_sigterm:
            recovery = self._get(self.config_init, "recovery")
            return INTERRUPTED if recovery.interrupted else STOPPED
        return INTERRUPTED if self.trainer.interrupted and end.code == 1 else None  # Ctrl-C, a second one

    def _how_to_go_on(self, status: int) -> str:
        """The command that resumes, from the newest checkpoint there is."""
        run = Path(self.trainer.default_root_dir)
        text = f"stopped by {'Ctrl-C' if status == INTERRUPTED else 'SIGTERM'}"
        if self.subcommand != "fit":
            return text
        text += f" after step {self.trainer.global_step}"
        found = [run / RECOVERY] if (run / RECOVERY).is_file() else list(run.glob("**/*.ckpt"))
        if not found:
            return f"{text}; no checkpoint was written yet"
        newest = max(found, key=lambda path: path.stat().st_mtime)
        return (
            f"{text}; go on with: python scripts/train.py fit -c {run / 'config.yaml'} --ckpt_path {newest}"
        )

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
