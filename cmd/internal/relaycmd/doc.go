// Package relaycmd has the commands with which an operator administers a relay: its tokens, invites,
// boards and keys, and the files of its state directory.
//
// The commands for tokens, invites and boards work in two ways. Where they name a relay they call it
// over HTTP, with a token that has the scope for the change, on every system. Else they open the
// state directory of a relay on this machine, which needs Linux and no token: whoever may write the
// directory is its operator. Both ways print the same, and the audit log has the changes of both. A
// relay that runs sees a change in its directory by itself, so that only the commands that replace
// its files need it stopped.
//
// 'agentctl relay', which runs a relay, is in package main.
package relaycmd
