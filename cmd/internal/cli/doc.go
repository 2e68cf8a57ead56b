// Package cli has what the commands of agentctl share: exit codes, errors with their next step, output
// for people and programs, common flags, the client of a relay, and completion of names.
//
// A package of commands calls it and prints; it holds no command itself, and links neither the
// daemon nor the relay.
package cli
