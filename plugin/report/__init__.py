"""Run files, HTML reports and offline comparison."""
