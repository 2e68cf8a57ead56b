//go:build race

package mcp

// The race detector makes each notification several times as expensive.
const stalledReaderPeers = 4
