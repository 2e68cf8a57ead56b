package fleet

import (
	"context"
	"errors"

	"agentctl/manifest"
)

// Reasons for which a board has no value, as the answers of all tools give them (docs/fleet.md).
const (
	reasonOffline     = "offline"
	reasonSuspect     = "suspect"      // it has a link and does not answer
	reasonNoHistory   = "no_history"   // it runs a version without history, or history is off
	reasonNotMeasured = "not_measured" // it has not recorded or does not measure this
	reasonNoAnswer    = "no_answer"    // it did not answer in time
	reasonNotAsked    = "not_asked"    // there was no time to ask it; asking fewer boards helps
	reasonBusy        = "busy"         // a rate limit, of the board or of the caller
	reasonRefused     = "refused"      // the caller may not call its tool
	reasonBadAnswer   = "bad_answer"   // its answer does not fit the question
	reasonFailed      = "failed"       // any other error
)

// Outcomes of questions that did not reach the kernel, or whose answer was not used. reasonOf
// recognizes them.
var (
	errNotAsked    = &manifest.Error{Code: manifest.DeadlineExceeded, Message: "there was no time to ask this board", Reason: "not_asked", Outcome: manifest.NotSent}
	errNoTool      = &manifest.Error{Code: manifest.BadRequest, Message: "the board has no such tool", Reason: "no_tool"}
	errNoHistory   = &manifest.Error{Code: manifest.BadRequest, Message: "the board has no history", Reason: "no_history"}
	errBadHistory  = &manifest.Error{Code: manifest.Internal, Message: "the board's history does not fit the question", Reason: "bad_result"}
	errSlowHistory = &manifest.Error{Code: manifest.DeadlineExceeded, Message: "the board reads its history too slowly", Reason: "slow"} // beyond maxHistoryPages
)

// statusReason returns why a board is not asked, "" if it can be.
func statusReason(b *Board) string {
	switch b.Status {
	case Online:
		return ""
	case Suspect:
		return reasonSuspect
	}
	return reasonOffline
}

// reasonOf returns the reason for a board whose tool answered with an error.
func reasonOf(err error) string {
	e := manifest.AsError(err)
	switch {
	case errors.Is(err, errNoHistory), e.Code == manifest.BadRequest && e.Reason == "tool":
		return reasonNoHistory
	case errors.Is(err, errNoTool):
		return reasonNotMeasured
	case errors.Is(err, errNotAsked):
		return reasonNotAsked
	case e.Code == manifest.NodeOffline && e.Reason == "suspect":
		return reasonSuspect
	case e.Code == manifest.NodeOffline:
		return reasonOffline
	case e.Code == manifest.DeadlineExceeded, errors.Is(err, context.DeadlineExceeded):
		return reasonNoAnswer
	case e.Code == manifest.RateLimited:
		return reasonBusy
	case e.Code == manifest.SafetyDenied:
		return reasonRefused
	case e.Reason == "bad_result":
		return reasonBadAnswer
	}
	return reasonFailed
}

// coarseReasonOf is reasonOf in the words of fleet.find and fleet.describe, which are fewer: they ask
// no history, and a rate limit refuses like a scope.
func coarseReasonOf(err error) string {
	switch reason := reasonOf(err); reason {
	case reasonBusy:
		return reasonRefused
	case reasonNoHistory, reasonNotMeasured, reasonBadAnswer:
		return reasonFailed
	default:
		return reason
	}
}
