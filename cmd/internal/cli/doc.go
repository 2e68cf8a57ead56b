// Package cli has what the commands of agentctl share: exit codes, errors with their next step, output
// for people and programs, common flags, the client of a relay, and completion of names.
//
// A package of commands calls it and prints; it holds no command itself, and links neither the
// daemon nor the relay.
//
//	exit, explain*   how an error becomes an exit code and a next step
//	output, limits   -o and --json; --count and --for
//	flags, relay     flags that several commands have; the relay and who calls it
//	token, confirm   secrets and answers that a person gives (invite_code too)
//	complete         candidates for a shell, asked of the relay
//	logger, signal   for the commands that serve
//	build, platform  what this binary is, and on which system
//
// It keeps no state between commands: the flags are in the values of the command that added them.
package cli
