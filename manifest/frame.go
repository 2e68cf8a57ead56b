package manifest

// Frame is one element of a stream. Data is its JSON; Event is the same as a whole
// server-sent event, encoded once for all subscribers, or empty when nobody needs it.
// Both are shared and read-only.
type Frame struct {
	Data  []byte
	Event []byte
}
