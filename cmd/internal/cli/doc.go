// Package cli has what the commands of agentctl share: exit codes, errors with their next step, output
// for people and programs, common flags, the client of a relay, and completion of names.
//
// A package of commands calls it and prints; it holds no command itself, and links neither the
// daemon nor the relay.
//
//	exit, explain*      the exit code and the next step for an error
//	output, limits      -o and --json; --count and --for
//	flags, relay        flags that several commands have; the relay and the identity that calls it
//	token, invite_code  read a secret from a file, an argument or stdin
//	confirm             a question to a person
//	complete            candidates for a shell, asked of the relay
//	logger, signal      for the commands that serve
//	build, platform     what this binary is, and on which system
//
// It keeps no state between commands: the values of flags are in the types here that add them.
package cli
