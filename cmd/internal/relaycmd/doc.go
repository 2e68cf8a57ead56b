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
// adminFlags.run decides which way a command of node and invite goes, tokenFlags.isRemote for those of
// token. For nodes and invites both ways have one interface (nodeAdmin, inviteAdmin), which the HTTP client
// implements as it is, and which localNodes and localInvites implement on the store. So the texts, the
// undo and -o json are written once, with the types of the HTTP API. Errors are not shared: over HTTP
// cli.Explain derives the exit code from the answer, and the local implementations choose the same code.
//
// # Output
//
// On stdout is what a script reads: a token, the line to paste, the path of a backup, a table, or with -o
// the answer as data. What a person needs besides goes to stderr where stdout is for a script. A command
// that changes something ends its sentence with the command that undoes it, or says that nothing does.
// Texts of a relay or a board pass term.SafeLine before a terminal gets them.
//
// # Ctrl-C and crashes
//
// Ctrl-C ends the context of the command. A change of relay.db is one transaction, and an exchange of
// files is completed by the next process that opens the directory (auth.Exclusive.Swap), so a command
// that was stopped has made its change or not. Many tokens at once take several transactions: see
// auth.Store.Mint for what can remain.
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
