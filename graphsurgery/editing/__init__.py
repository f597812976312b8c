"""What passes build edits from: selecting rows, slicing masks, shape operands, operators in the form of an opset."""
