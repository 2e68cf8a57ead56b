// Package clientcmd has the commands that use a relay from any machine: ls, describe, call, tickets,
// login, context and verify.
//
// They run on Linux, macOS and Windows, and all but verify are in the build for boards. Package
// client makes their requests; here are their flags and what they print. Results go to stdout, and
// what people should know besides goes to stderr, so that a pipe gets results only.
package clientcmd
