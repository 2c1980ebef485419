"""One file a dataset: public layout → canonical tables (`fovea.tables`)."""
