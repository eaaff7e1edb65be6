"""How well questions about the past are answered from memory: footage, data sets, scores and reports."""
