// Package boardcmd has the commands of a board: its daemon (run), joining and leaving a relay, settings,
// checks, and readings from the daemon's control socket.
//
// They need Linux, except history, which also shows the records of a board behind a relay. The board
// build contains all of them, so the package links nothing of the relay.
package boardcmd
