"""What the method stands on: files that are checked, progress bars, products in pieces, the bundled target."""
