"""The model: builder, local layers for CPU, weights from and to Hugging Face."""
