"""Where the mismatch between engine and trainer comes from: layer by layer, part by part."""
