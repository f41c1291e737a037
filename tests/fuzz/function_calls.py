def function_calls():
    return []
