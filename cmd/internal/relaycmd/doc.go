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
//
// # The two ways
//
// adminFlags.run selects the way for node and invite, tokenFlags.isRemote for token. For nodes and invites
// both ways have one interface (nodeAdmin, inviteAdmin): *client.Client implements it, and localNodes and
// localInvites do on the store. So the texts, the undo and -o json are written once, with the types of the
// HTTP API. Errors are not shared: over HTTP cli.Explain derives the exit code from the answer, and the local
// implementations have to choose the same one.
//
// # Output
//
// Stdout has what a script reads: a token, the line to paste, the path of a backup, a table, or with -o
// the answer as data. Further text for people then goes to stderr. A command that changes something prints
// the command that undoes it, or says that there is none. Texts of a relay or a board pass term.SafeLine on
// their way to a terminal.
//
// # Ctrl-C and crashes
//
// A command that was stopped has made its change as a whole or not at all: a change of relay.db is one
// transaction, and the next process that opens the directory completes an exchange of files
// (auth.Exclusive.Swap). Only many tokens at once take several transactions (auth.Store.Mint).
//
// # Files
//
//	admin            flags of node and invite, and the choice of the way
//	state_linux      opening a state directory, and the audit log of changes in it
//	state_other      the same functions on other systems, which refuse
//	token*           token; token_admin has both ways, token_out the file of a new token
//	node, invite*    node and invite; *_local are the ways into a state directory
//	scopes           the flags of what a token or an invite grants, and their completion
//	keys             signing keys; state directory only, as all below
//	backup           backup, restore, restore --accept-loss
//	check, salvage   what package checkup finds, and a new event log from a damaged one
//	status           the running relay, over its socket
//	explain_state    the next step for an error of a state directory
package relaycmd
