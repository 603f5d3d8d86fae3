"""Other programs that show a run: TensorBoard, Weights & Biases, MLflow."""
