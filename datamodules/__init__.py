"""Data: readers turn public files into canonical tables, DataModules turn tables into batches."""
