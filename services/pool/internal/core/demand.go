package core

// Demand is how much the pool is used.
type Demand struct{}
