"""The driver's side of weight sync: transfers, replaced engines, verification."""
