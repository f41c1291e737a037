def forward_calls():
    return []
