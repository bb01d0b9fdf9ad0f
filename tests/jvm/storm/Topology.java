import java.util.Map;
import java.util.Properties;

import org.apache.kafka.common.serialization.StringSerializer;
import org.apache.storm.Config;
import org.apache.storm.LocalCluster;
import org.apache.storm.kafka.bolt.KafkaBolt;
import org.apache.storm.kafka.bolt.mapper.FieldNameBasedTupleToKafkaMapper;
import org.apache.storm.kafka.spout.FirstPollOffsetStrategy;
import org.apache.storm.kafka.spout.KafkaSpout;
import org.apache.storm.kafka.spout.KafkaSpoutConfig;
import org.apache.storm.topology.TopologyBuilder;

/**
 * A topic to a topic through Storm's local cluster: two Kafka spouts, two Kafka bolts, at least once.
 *
 * <p>Arguments: bootstrap, source topic, target topic, group. Runs until it is killed or its input ends; what has arrived
 * is for the caller to judge. Only classes of Storm go into the topology: nothing here has to be serializable.
 */
public final class Topology {
    private static final String NAME = "copy";

    public static void main(String[] arguments) throws Exception {
        String bootstrap = arguments[0];
        TopologyBuilder builder = new TopologyBuilder();
        builder.setSpout("spout", new KafkaSpout<>(spout(bootstrap, arguments[1], arguments[3])), 2);
        builder.setBolt("bolt", bolt(bootstrap, arguments[2]), 2).shuffleGrouping("spout");
        Config config = new Config();
        config.setNumWorkers(1);
        config.setMaxSpoutPending(2_000);
        config.setMessageTimeoutSecs(300); // no replay on a busy machine: the caller counts
        try (LocalCluster cluster = new LocalCluster()) {
            cluster.submitTopology(NAME, config, builder.createTopology());
            while (System.in.read() >= 0) {
                // wait for the end of the input
            }
        }
        System.exit(0); // threads of the local cluster may outlive it
    }

    private static KafkaSpoutConfig<String, String> spout(String bootstrap, String topic, String group) {
        return KafkaSpoutConfig.builder(bootstrap, topic)
                .setProp("group.id", group)
                .setFirstPollOffsetStrategy(FirstPollOffsetStrategy.UNCOMMITTED_EARLIEST)
                .setProcessingGuarantee(KafkaSpoutConfig.ProcessingGuarantee.AT_LEAST_ONCE)
                .setOffsetCommitPeriodMs(500)
                .build();
    }

    private static KafkaBolt<String, String> bolt(String bootstrap, String topic) {
        Properties settings = new Properties();
        settings.putAll(Map.of(
                "bootstrap.servers", bootstrap,
                "acks", "all",
                "linger.ms", "5",
                "key.serializer", StringSerializer.class.getName(),
                "value.serializer", StringSerializer.class.getName()));
        return new KafkaBolt<String, String>()
                .withProducerProperties(settings)
                .withTopicSelector(topic)
                .withTupleToKafkaMapper(new FieldNameBasedTupleToKafkaMapper<>("key", "value"));
    }
}
