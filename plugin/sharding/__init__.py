"""How samples are split over context-parallel ranks: the only place that computes the zigzag."""
