"""Training: one LightningModule a paper loss, each thin over `fovea/`."""
