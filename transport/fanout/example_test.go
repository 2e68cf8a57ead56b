package fanout_test

import (
	"fmt"

	"agentctl/transport/fanout"
)

func ExampleTopic() {
	topic := fanout.New[string](fanout.Options{Ring: 100})
	topic.Publish("one")
	topic.Publish("two")

	// A subscriber that saw number 1 comes back, and live values follow.
	sub := topic.Subscribe(fanout.SubscribeOptions[string]{Resume: true, After: 1})
	defer sub.Close()
	topic.Publish("three")

	<-sub.Ready()
	for v, ok := sub.Next(); ok; v, ok = sub.Next() {
		fmt.Println(v)
	}
	// Output:
	// two
	// three
}
