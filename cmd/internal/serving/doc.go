//go:build linux && !agentctl_omit_relay

// Package serving has what the commands that serve, 'agentctl relay' and 'agentctl events serve',
// share: their common flags, reloads on SIGHUP, and the settings of the event gateway in the environment.
package serving
