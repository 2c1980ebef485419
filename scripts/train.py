"""Start any training run: `train.py {fit,validate,test,predict} -c configs/….yaml [--model.lr=…]`."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import lightning as L
from jsonargparse import ActionConfigFile
from lightning.pytorch.cli import ArgsType, LightningArgumentParser, LightningCLI, SaveConfigCallback


class Parser(LightningArgumentParser):
    """Ends on the cause: the usage of every option is pages long and hides it."""

    def error(self, message: str, ex: Exception | None = None) -> None:  # type: ignore[override]
        """Print what is wrong and how to see the options; exit code 2."""
        sys.stderr.write(f"train.py: error: {message}\n\nOptions: python scripts/train.py fit --help\n")
        raise SystemExit(2)


class SaveResolvedConfig(SaveConfigCallback):
    """The resolved config lies at the top of the run's directory, whatever the logger."""

    def save_config(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Called on rank 0."""
        directory = Path(trainer.default_root_dir)
        directory.mkdir(parents=True, exist_ok=True)
        (directory / "config.yaml").write_text(
            self.parser.dump(self.config, skip_none=False, skip_check=True)
        )


class Cli(LightningCLI):
    """LightningCLI as is, with the project's parser."""

    def init_parser(self, **kwargs: object) -> LightningArgumentParser:
        """Our parser class."""
        parser = Parser(**kwargs)  # type: ignore[arg-type]
        parser.add_argument("-c", "--config", action=ActionConfigFile, help="A YAML config; later ones win.")
        return parser


def main(args: ArgsType = None) -> Cli:
    """Build from the config, run the subcommand, save."""
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
    )


if __name__ == "__main__":
    main()
